"""python -m tests.fuzz --seconds 600 [NAME …]: fuzz the parsers of outside bytes in turns, for so long altogether.

Prints what it found, smallest input first made smaller, and ends with status 1; inputs that failed are tried first the
next time (they are kept in .hypothesis).
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS, Target, run

EXAMPLES_A_TURN = 200


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz the parsers of outside bytes.")
    parser.add_argument("names", nargs="*", help="targets; default: all of " + ", ".join(t.name for t in TARGETS))
    parser.add_argument("--seconds", type=float, default=60.0, help="time altogether (default: 60)")
    options = parser.parse_args()
    logging.disable()
    chosen = [target for target in TARGETS if not options.names or target.name in options.names]
    ends_at = time.monotonic() + options.seconds
    num_inputs = dict.fromkeys((target.name for target in chosen), 0)
    broken: set[str] = set()
    while chosen and time.monotonic() < ends_at:
        for target in chosen:
            if target.name not in broken and time.monotonic() < ends_at and not _turn(target, num_inputs):
                broken.add(target.name)
        chosen = [target for target in chosen if target.name not in broken]
    for name, count in num_inputs.items():
        print(f"{name:28} {count:8} inputs  {'BROKEN' if name in broken else 'ok'}")
    return 1 if broken else 0


def _turn(target: Target, num_inputs: dict[str, int]) -> bool:
    @settings(max_examples=EXAMPLES_A_TURN, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def fuzz(data: Any) -> None:
        num_inputs[target.name] += 1
        run(target, data.draw(target.inputs))

    try:
        fuzz()
    except Exception:  # noqa: BLE001 - whatever it is, it is what was looked for
        print(f"--- {target.name}", file=sys.stderr)
        traceback.print_exc()
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
