"""Where a request's time went, for people: one line, or one row of a table."""

from __future__ import annotations

from rich import box
from rich.table import Table

from diptych.client import Answer

# Of usage.timings, in the order in which they begin. Readers see the same names as in answers, metrics and documents.
STAGES = ("fetch", "decode", "preprocess", "encode", "queue", "transfer", "prefill", "decode_tokens")


def timing_line(answer: Answer) -> str:
    """ "1.20 s: encode 31 ms, prefill 85 ms, decode tokens 800 ms; 137 + 25 tokens, 112 cached" """
    timings = answer.timings
    spent = [f"{_words(stage)} {milliseconds(timings[stage])} ms" for stage in STAGES if stage in timings]
    prompt, generated = answer.usage.get("prompt_tokens", 0), answer.usage.get("completion_tokens", 0)
    first = "" if answer.first_token_s is None else f", first token after {milliseconds(answer.first_token_s)} ms"
    return (
        f"{answer.total_s:.2f} s{first}{': ' if spent else ''}{', '.join(spent)}; "
        f"{prompt} + {generated} tokens, {answer.num_cached_tokens} cached"
    )


def timing_table(rows: list[tuple[str, Answer]]) -> Table:
    """One row a request, milliseconds per stage. A stage that did not run shows a dot."""
    table = Table(
        title="Where the time went, in milliseconds", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("request", no_wrap=True)
    for name in [*map(_words, STAGES), "total", "tokens", "cached"]:
        table.add_column(name, justify="right")
    for name, answer in rows:
        timings = answer.timings
        stages = [milliseconds(timings[stage]) if timings.get(stage) else "·" for stage in STAGES]
        tokens = f"{answer.usage.get('prompt_tokens', '?')} + {answer.usage.get('completion_tokens', '?')}"
        table.add_row(name, *stages, milliseconds(answer.total_s), tokens, str(answer.num_cached_tokens))
    return table


def _words(stage: str) -> str:
    """With spaces, at which a narrow table can break the line."""
    return stage.replace("_", " ")


def milliseconds(seconds: float) -> str:
    """1.2345 -> "1234", 0.0012345 -> "1.2" """
    return f"{1000 * seconds:.0f}" if seconds >= 0.01 else f"{1000 * seconds:.1f}"
