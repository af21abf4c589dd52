"""What speculative decoding gains and costs: `python -m bench.speculation FOLDER [--draft-model FOLDER] [--batch 1,8]`.

One engine in this process, no HTTP, greedy, EOS ignored. Two kinds of prompts: one whose answer repeats it, and one
whose answer repeats as little as the model manages. Runs with and without drafts take turns, on one engine, so that a
busy machine slows both down; the medians and their ratio are printed, with how many drafted tokens held. The answers
of both must be equal, or it says so and ends with status 1. With a draft model, look-up alone is compared with look-up
and the model.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from services.text_engine.build import BuiltEngine, build_engine
from services.text_engine.config import TextEngineSettings
from services.text_engine.core.batch import DraftMethod
from services.text_engine.core.speculation.draft_model import DraftModelDrafter
from services.text_engine.core.speculation.interface import DraftCounts
from services.text_engine.core.speculation.prompt_lookup_drafter import PromptLookupDrafter
from services.text_engine.engine_io import EngineRequest, TokenOutput
from shared.sampling import SamplingParams
from shared.wire.engine import ChatMessage, TextPart

WORDS = (
    "river",
    "mountain",
    "window",
    "garden",
    "letter",
    "engine",
    "market",
    "winter",
    "summer",
    "doctor",
    "teacher",
    "village",
    "music",
    "paper",
    "bridge",
    "kitchen",
    "station",
    "island",
    "forest",
    "mirror",
    "shadow",
    "button",
    "candle",
    "pocket",
    "ticket",
    "blanket",
    "carpet",
    "hammer",
    "ladder",
    "needle",
    "orange",
    "pepper",
)
ITEMS = ("apple", "chair", "lamp", "table", "pencil", "bottle", "clock", "basket", "spoon", "towel")
STORY = "Write a long story about a {0}, a {1} and a {2}. Do not repeat yourself."


def repeating(rng: random.Random) -> str:
    """A list to be copied: the answer is in the prompt, apart from its first words."""
    rows = "\n".join(
        f"{number}. {rng.choice(ITEMS)}, {rng.choice(WORDS)} {rng.choice(WORDS)}, {rng.randrange(10, 999)} pieces"
        for number in range(1, 25)
    )
    return f"Copy this list exactly as it is, with all rows.\n\n{rows}"


def fresh(rng: random.Random) -> str:
    return STORY.format(*rng.sample(WORDS, 3))


TEXTS = {"repeats its prompt": repeating, "repeats little": fresh}
COLUMNS = ("text", "batch", "guesses by", "longest draft", "without, tok/s", "with, tok/s", "ratio", "held of drafted")

AnyDrafter = PromptLookupDrafter | DraftModelDrafter


@dataclass
class Result:
    """tokens_per_s of each run; counts of each run with drafts."""

    without: list[float] = field(default_factory=list)
    with_drafts: list[float] = field(default_factory=list)
    counts: list[dict[DraftMethod, DraftCounts]] = field(default_factory=list)
    num_different: int = 0

    @property
    def ratio(self) -> float:
        return statistics.median(self.with_drafts) / statistics.median(self.without)

    @property
    def held(self) -> str:
        """Of the tokens that each method drafted."""
        words = []
        for method in sorted({method for counts in self.counts for method in counts}):
            of_method = [counts[method] for counts in self.counts if method in counts]
            held = sum(counts.num_accepted_tokens for counts in of_method)
            words.append(f"{method}: {held} of {sum(counts.num_draft_tokens for counts in of_method)}")
        return ", ".join(words) or "none drafted"


def prompts_of(built: BuiltEngine, kind: str, batch: int, salt: int) -> list[list[int]]:
    """Others in every run: nobody finds them in the prefix cache."""
    texts = [TEXTS[kind](random.Random(1000 * salt + i)) for i in range(batch)]
    messages = [ChatMessage(role="user", content=[TextPart(text=text)]) for text in texts]
    return [built.prompts.from_messages([message], None).token_ids for message in messages]


def decode(built: BuiltEngine, prompts: list[list[int]], num_output: int) -> tuple[float, dict[str, list[int]]]:
    """Answer all prompts together. Tokens a second from the moment all have their first token, and the answers."""
    engine = built.engine
    sampling = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    answers: dict[str, list[int]] = {}
    for i, token_ids in enumerate(prompts):
        engine.add(EngineRequest(request_id=f"r{i}", token_ids=token_ids, sampling=sampling))
    started, num_before = None, 0
    while engine.num_requests:
        for output in engine.step() or []:
            if isinstance(output, TokenOutput):
                answers.setdefault(output.request_id, []).extend(output.token_ids)
        if started is None and len(answers) == len(prompts):
            started, num_before = time.perf_counter(), sum(map(len, answers.values()))
    assert started is not None
    num_tokens = sum(map(len, answers.values())) - num_before
    return num_tokens / (time.perf_counter() - started), answers


def measure(built: BuiltEngine, drafter: AnyDrafter, kind: str, batch: int, num_output: int, reps: int) -> Result:
    scheduler = built.engine.scheduler
    result = Result()
    for rep in range(reps):
        prompts = prompts_of(built, kind, batch, rep)
        answers = {}
        for uses_drafts in (False, True) if rep % 2 else (True, False):
            scheduler.drafter = drafter if uses_drafts else None
            scheduler.take_draft_counts()
            tokens_per_s, answers[uses_drafts] = decode(built, prompts, num_output)
            (result.with_drafts if uses_drafts else result.without).append(tokens_per_s)
            if uses_drafts:
                result.counts.append(scheduler.take_draft_counts())
        result.num_different += sum(answers[True][name] != answers[False][name] for name in answers[True])
    return result


def drafters_of(built: BuiltEngine) -> dict[str, AnyDrafter]:
    """By what to call them: look-up alone, and the engine's own where a model guesses too."""
    drafter = built.engine.scheduler.drafter
    if isinstance(drafter, DraftModelDrafter):
        return {"look-up": drafter.lookup, "look-up and model": drafter}
    assert isinstance(drafter, PromptLookupDrafter)
    return {"look-up": drafter}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--draft-model", type=Path, default=None, help="folder of a smaller one of its vocabulary")
    parser.add_argument("--batch", default="1,8,32", help="sequences at once")
    parser.add_argument("--lengths", default=None, help="num_speculative_tokens to compare; default: the setting's")
    parser.add_argument("--output", type=int, default=192, help="tokens of each answer")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    batches = [int(part) for part in options.batch.split(",")]
    settings = TextEngineSettings(
        model=options.folder,
        dtype=options.dtype,
        speculative="ngram",
        speculative_model=options.draft_model,
        max_num_seqs=max(batches),
        enable_prefix_caching=False,
    )
    built = build_engine(settings, lambda _: None)
    drafters = drafters_of(built)
    lookup = drafters["look-up"]
    assert isinstance(lookup, PromptLookupDrafter)
    lengths = [settings.num_speculative_tokens]
    if options.lengths is not None:
        lengths = [int(part) for part in options.lengths.split(",")]
    console = Console(width=120)
    console.print(f"{options.folder.name}; steps by their tokens: {lookup.costs}")
    if len(drafters) > 1:
        console.print(f"{options.draft_model.name}, which guesses: {drafters['look-up and model'].costs}")
    table = Table()
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "text" else "right")
    num_different = 0
    for kind, batch, name, length in itertools.product(TEXTS, batches, drafters, lengths):
        lookup.num_speculative_tokens = length
        result = measure(built, drafters[name], kind, batch, options.output, options.reps)
        num_different += result.num_different
        table.add_row(
            kind,
            str(batch),
            name,
            str(length),
            f"{statistics.median(result.without):.0f}",
            f"{statistics.median(result.with_drafts):.0f}",
            f"{result.ratio:.2f}",
            result.held,
        )
    console.print(table)
    if num_different:
        console.print(f"{num_different} answers differ with drafts from those without")
        sys.exit(1)


if __name__ == "__main__":
    main()
