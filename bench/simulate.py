"""What would happen: traces of any length on any number of engines and encoders, in seconds, without computing a token.

  python -m bench.simulate --requests 100000 --engines 4 --load 0.7
  python -m bench.simulate --mix documents --max-prefill-tokens-while-decoding none,256,128,64
  python -m bench.simulate --preset h100 --engines 8 --encoders 2,4 --routing affinity,round_robin
  python -m bench.simulate --workload W1,W2,W3

The scheduler, the block pool and the balancer are the real ones; a step's seconds come from a cost model. Settings
given as lists are compared in all combinations, one line of the table each. Equal arguments give equal tables.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from diptych.bench.workloads import iter_requests
from diptych.simulator.cluster import simulate
from diptych.simulator.costs import PRESETS, CostModel
from diptych.simulator.report import figures, table
from diptych.simulator.trace import MIXES, Conversation, Turn, bursty, make_trace, means, poisson
from diptych.simulator.world import Result, Settings

USUAL_BATCH = 16  # what `--load` reckons with


def main(argv: list[str] | None = None) -> None:
    given = parser().parse_args(argv)
    costs = PRESETS[given.preset]
    rows = []
    for choice in choices(given):
        started = time.process_time()
        settings = Settings(**{name: value for name, value in choice.items() if name in SETTINGS})
        num_blocks = choice["num_blocks"] or costs.num_blocks
        result = play(given, replace(costs, num_blocks=num_blocks), settings, choice)
        row = figures(result, settings.engines, settings.encoders)
        row["simulation_s"] = round(time.process_time() - started, 1)
        rows.append((choice, row))
        if given.json:
            print(json.dumps(choice | row), flush=True)
    if not given.json:
        varied = [name for name in rows[0][0] if len({str(choice[name]) for choice, _ in rows}) > 1]
        fixed = {name: value for name, value in rows[0][0].items() if name not in varied}
        print(f"cost model {given.preset}: {costs.source}\n")
        print(", ".join(f"{name} {value}" for name, value in fixed.items()) + "\n")
        print(table([({name: str(choice[name]) for name in varied}, row) for choice, row in rows]))
        print(f"\nA decode step of 64 sequences at 500 tokens: {costs.decode_step_s(64, 500) * 1000:.0f} ms.")


SETTINGS = {
    "engines": int,
    "encoders": int,
    "routing": str,
    "max_num_seqs": int,
    "max_num_batched_tokens": int,
    "max_prefill_tokens_while_decoding": int,
    "step_ratio": float,
    "step_target_s": float,
}


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--preset", choices=PRESETS, default="cpu")
    options.add_argument("--mix", choices=MIXES, default="chat")
    options.add_argument("--workload", help="W1, W2, W3 of `diptych bench` instead of a mix; a list")
    options.add_argument("--requests", type=int, default=20_000)
    options.add_argument("--load", default="0.7", help="share of what the engines could do, about; a list")
    options.add_argument("--arrivals", choices=("poisson", "bursty"), default="poisson")
    options.add_argument("--users", type=int, help="so many at a time, none thinking, instead of arrivals: full load")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--num-blocks", default="none", help="KV blocks of an engine; a list; none: the preset's")
    options.add_argument("--json", action="store_true", help="one line of JSON for each configuration")
    for name, type_ in SETTINGS.items():
        default = getattr(Settings(), name)
        text = "a list" if type_ is str else "a list; none: no limit" if default is None else "a list"
        options.add_argument("--" + name.replace("_", "-"), default=str(default), help=f"{text} (default {default})")
    return options


def choices(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All combinations of what was given as lists."""
    lists: dict[str, list[Any]] = {}
    if given.workload:
        lists["workload"] = [*given.workload.split(",")]
    else:
        lists["mix"] = [given.mix]
        if given.users is None:
            lists["load"] = [float(load) for load in given.load.split(",")]
    for name, type_ in (SETTINGS | {"num_blocks": int}).items():
        lists[name] = [None if text.lower() == "none" else type_(text) for text in getattr(given, name).split(",")]
    for values in itertools.product(*lists.values()):
        yield dict(zip(lists, values, strict=True))


def play(given: argparse.Namespace, costs: CostModel, settings: Settings, choice: dict[str, Any]) -> Result:
    max_users = None
    trace: Iterable[Conversation]
    if given.workload:
        trace = workload(choice["workload"])
    else:
        mix = MIXES[given.mix]
        arrivals: Iterator[float] = itertools.repeat(0.0)
        if given.users is None:
            new, context, output = means(mix, costs.image_tokens)
            rate = choice["load"] * settings.engines / costs.request_s(new, context, output, USUAL_BATCH)
            arrivals = {"poisson": poisson, "bursty": bursty}[given.arrivals](rate / mix.mean_turns, given.seed)
        else:
            mix, max_users = replace(mix, think_s=0.0), given.users * settings.engines
        trace = make_trace(mix, arrivals, num_requests=given.requests, seed=given.seed)
    gc.disable()  # nothing here is cyclic, and the collector would walk through every token list
    try:
        return simulate(costs, settings, iter(trace), seed=given.seed, max_users=max_users)
    finally:
        gc.enable()


def workload(name: str) -> Iterator[Conversation]:
    """All requests at once, no two alike."""
    for request in iter_requests(name, seed=0):
        turn = Turn(0.0, request.num_prompt_tokens, request.num_output_tokens)
        yield Conversation(0.0, 0, 0, (turn,))


if __name__ == "__main__":
    main()
