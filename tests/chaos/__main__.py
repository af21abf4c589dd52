"""Break one thing after another under load, and say what came of it.

  python -m tests.chaos [--only NAME ...] [--encoders N] [--engines N] [--out report.md]

The exit code is the number of faults whose verdict is bad.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.chaos.cluster import MODEL, Cluster, Holdings, running_cluster
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.traffic import GIVE_UP_S, Outcome, Questions, Traffic
from tests.e2e.system import ROOT

BEFORE_S: Final = 2.0
AFTER_S: Final = 2.0
RECOVER_WITHIN_S: Final = 60.0
MORE_FILES: Final = 12  # open connections that a service keeps for the next request
MORE_CHILDREN: Final = 0
PICTURES: Final = ("animal", "count", "food", "number")


@dataclass
class Verdict:
    """
    recovered_s   from the end of the fault until every replica is ready again and no request ends badly
    why_not       why the fault was not tried
    """

    name: str
    ends: Counter[str]
    problems: list[str] = field(default_factory=list)
    recovered_s: float = 0.0
    slowest_s: float = 0.0
    why_not: str = ""

    @property
    def is_good(self) -> bool:
        return not self.problems

    def row(self) -> str:
        if self.why_not:
            return f"| {self.name} | | | | | not tried: {self.why_not} |"
        lost = ", ".join(f"{count} {end}" for end, count in sorted(self.ends.items()) if end != "right") or "none"
        verdict = "good" if self.is_good else "; ".join(self.problems)
        return (
            f"| {self.name} | {self.ends['right']} | {lost} | {self.slowest_s:.1f} | {self.recovered_s:.1f} "
            f"| {verdict} |"
        )


HEAD: Final = (
    "| fault | answered rightly | others | slowest answer, s | recovered after, s | verdict |\n"
    "|---|---|---|---|---|---|"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=sorted(FAULTS), help="this fault; may be repeated")
    parser.add_argument("--out", type=Path, help="file for the report as Markdown; default: standard output only")
    parser.add_argument("--clients", type=int, default=4, help="requests at a time")
    parser.add_argument("--encoders", type=int, default=2, help="vision encoders")
    parser.add_argument("--engines", type=int, default=2, help="text engines")
    given = parser.parse_args()
    print(HEAD, flush=True)
    verdicts: list[Verdict] = []
    unexpected: list[str] = []
    for names in rounds(given.only or list(FAULTS)):
        more_verdicts, more_unexpected = try_together(names, given.encoders, given.engines, given.clients)
        verdicts += more_verdicts
        unexpected += more_unexpected
    report = "\n".join(
        [
            HEAD,
            *(verdict.row() for verdict in verdicts),
            "",
            f"Log lines with a traceback: {len(unexpected)}",
            *unexpected[:20],
        ]
    )
    print(report.rpartition("|")[2], flush=True)
    if given.out:
        given.out.write_text(report + "\n")
    return sum(not verdict.is_good for verdict in verdicts)


def rounds(names: Sequence[str]) -> list[list[str]]:
    """The faults that can share a cluster, together: those that want the same settings."""
    groups: dict[object, list[str]] = {}
    for name in names:
        groups.setdefault(FAULTS[name].settings, []).append(name)
    return list(groups.values())


def try_together(
    names: Sequence[str], num_encoders: int, num_engines: int, num_clients: int
) -> tuple[list[Verdict], list[str]]:
    """Verdicts of the faults, one after another on one cluster, and what stands in its logs and should not."""
    skipped = [Verdict(name, Counter(), why_not=why) for name in names if (why := FAULTS[name].why_not())]
    for verdict in skipped:
        print(verdict.row(), flush=True)
    names = [name for name in names if not FAULTS[name].why_not()]
    if not names:
        return skipped, []
    with tempfile.TemporaryDirectory(prefix="diptych-chaos-") as made:
        folder = Path(made)
        settings = FAULTS[names[0]].settings(folder)
        with running_cluster(folder, num_encoders, num_engines, **settings) as cluster:
            traffic = new_traffic(cluster, num_clients)
            verdicts = []
            for name in names:
                verdicts.append(try_fault(name, FAULTS[name], cluster, traffic))
                print(verdicts[-1].row(), flush=True)
            return skipped + verdicts, unexpected_lines(cluster)


def unexpected_lines(cluster: Cluster) -> list[str]:
    return [
        f"{service.name}: {line[:300]}"
        for service in cluster.system.services
        for line in service.log.splitlines()
        if "Traceback" in line or '"unexpected' in line
    ]


def new_traffic(cluster: Cluster, num_clients: int, give_up_s: float = GIVE_UP_S) -> Traffic:
    samples = ROOT / "models" / "demo" / "samples"
    traffic = Traffic(
        cluster.system.gateway.url,
        Questions(MODEL, [samples / f"{name}.png" for name in PICTURES]),
        num_clients,
        give_up_s,
    )
    traffic.learn()
    with traffic.running():  # connections, caches and thread pools as they are in a system that has been running
        time.sleep(BEFORE_S)
    return traffic


def try_fault(name: str, fault: Fault, cluster: Cluster, traffic: Traffic) -> Verdict:
    before = cluster.wait_until_quiet()
    traffic.outcomes.clear()
    with traffic.running():
        time.sleep(BEFORE_S)
        fault.act(cluster, traffic)
        healed = time.monotonic()
        while not cluster.is_whole() and time.monotonic() < healed + RECOVER_WITHIN_S:
            time.sleep(0.1)
        whole = time.monotonic()
        time.sleep(AFTER_S)
    after = cluster.wait_until_quiet()
    return judge(name, fault, traffic.outcomes, healed, whole, before, after)


def judge(
    name: str,
    fault: Fault,
    outcomes: list[Outcome],
    healed: float,
    whole: float,
    before: dict[str, Holdings],
    after: dict[str, Holdings],
) -> Verdict:
    verdict = Verdict(name, Counter(outcome.name for outcome in outcomes))
    bad = [outcome for outcome in outcomes if outcome.end != "right"]
    lost = [outcome for outcome in bad if outcome.end not in fault.may_lose]
    late = [outcome for outcome in bad if outcome.began > whole + 1.0]
    verdict.recovered_s = max([whole, *(outcome.ended for outcome in bad)]) - healed
    verdict.slowest_s = max((o.ended - o.began for o in outcomes), default=0.0)
    if lost:
        verdict.problems.append(f"{len(lost)} lost")
    if late:
        verdict.problems.append(f"{len(late)} bad ends after recovery")
    if whole - healed >= RECOVER_WITHIN_S:
        verdict.problems.append("not whole again")
    for service, held in after.items():
        if held.num_open:
            verdict.problems.append(f"{service} still holds {held.num_open:g}")
        if service in fault.restarts:
            continue
        if held.num_files > before[service].num_files + MORE_FILES:
            verdict.problems.append(f"{service} files {before[service].num_files} -> {held.num_files}")
        if held.num_children > before[service].num_children + MORE_CHILDREN:
            verdict.problems.append(f"{service} children {before[service].num_children} -> {held.num_children}")
    return verdict


if __name__ == "__main__":
    sys.exit(main())
