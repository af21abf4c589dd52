"""What a constrained answer costs: compiling its grammar, one token's mask, and laying the mask over the logits.

    python -m bench.grammar models/demo/checkpoint [FOLDER…]

Valid answers are followed token by token, as the engine does it, but each mask is waited for: in the engine a worker
thread computes it while the model runs, so that what is printed here as `mask` is hidden wherever a step takes longer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from services.text_engine.runner.grammar import GrammarCompiler
from services.text_engine.tokenizer import Tokenizer
from shared.sampling import Constraint

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]+$"}},
    },
    "required": ["name", "age", "email", "tags"],
    "additionalProperties": False,
}
PERSON_TEXT = '{"name": "Ada Lovelace", "age": 36, "email": "ada@example.org", "tags": ["poet", "engineer"]}'
CASES = {
    "json_object": (Constraint(kind="json_object"), PERSON_TEXT),
    "json_schema": (Constraint(kind="json_schema", value=json.dumps(PERSON)), PERSON_TEXT),
    "regex": (Constraint(kind="regex", value=r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}"), "1843-09-05T12:30"),
    "choice": (Constraint(kind="choice", value='["yes", "no", "perhaps"]'), "perhaps"),
}


def follow(compiler: GrammarCompiler, constraint: Constraint, token_ids: list[int]) -> list[float]:
    """Seconds until each token's mask is there, the first one included."""
    seconds = []
    matcher = compiler.matcher(constraint)
    for token_id in token_ids:
        started = time.perf_counter()
        assert matcher.allowed()[token_id], "the text must be an answer that the grammar allows"
        matcher.accept(token_id)
        matcher.allowed()
        seconds.append(time.perf_counter() - started)
    return seconds


def apply_seconds(vocab_size: int) -> float:
    row, mask = torch.zeros(vocab_size), torch.arange(vocab_size) % 7 == 0
    started = time.perf_counter()
    for _ in range(200):
        row.masked_fill_(~mask, float("-inf"))
    return (time.perf_counter() - started) / 200


def measure(folder: Path, table: Table) -> None:
    tokenizer = Tokenizer.load(folder)
    tokenizer.token_bytes(0)
    vocab_size = tokenizer.vocab_size
    end = tokenizer.token_id(tokenizer.eos_token or "") or 0
    compiler = GrammarCompiler(tokenizer, vocab_size=vocab_size, eos_token_ids={end}, num_workers=1)
    started = time.perf_counter()
    compiler.check(Constraint(kind="regex", value="a"))
    tables = time.perf_counter() - started
    for name, (constraint, text) in CASES.items():
        started = time.perf_counter()
        compiler.check(constraint)
        compiling = time.perf_counter() - started
        token_ids = tokenizer.encode_literal(text)
        cold = follow(compiler, constraint, token_ids)
        warm = [s for _ in range(20) for s in follow(compiler, constraint, token_ids)]
        figures = (statistics.median(warm), statistics.quantiles(warm, n=100)[98], max(cold), apply_seconds(vocab_size))
        micros = [f"{seconds * 1e6:.0f}" for seconds in figures]
        table.add_row(str(vocab_size), f"{tables * 1e3:.0f}", name, f"{compiling * 1e3:.2f}", *micros)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="+")
    table = Table()
    for column in ("vocabulary", "tables ms", "grammar", "compile ms", "mask µs", "p99", "worst cold", "apply µs"):
        table.add_column(column, justify="right")
    for folder in parser.parse_args().folder:
        measure(folder, table)
    Console().print(table)


if __name__ == "__main__":
    main()
