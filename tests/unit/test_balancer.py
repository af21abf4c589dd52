"""Which replica is chosen, and that no preference ever costs more than it is worth."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass

import pytest

from services.gateway.balancer import (
    AFFINITY_SLACK,
    LONGEST_EJECTION_S,
    MAX_MISSED_PROBES,
    SLOW_START_S,
    Pool,
    QueueKnownFull,
    Replica,
    by_rendezvous,
    is_worth_another_replica,
    without_latest_failure,
)
from services.gateway.discovery import resolve_replicas
from shared.errors import EncodeFailed, InvalidRequest, NotReady, UpstreamFailed, UpstreamTooLong


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


BROKEN = UpstreamFailed("it broke")


def pool_of(num_replicas: int, clock: Clock | None = None) -> Pool[str]:
    pool: Pool[str] = Pool(clock or Clock(), random.Random(7))
    pool.update(f"http://replica-{index}" for index in range(num_replicas))
    for replica in pool.replicas:
        replica.probed(ready=True, info="model")
    return pool


def key(index: int) -> bytes:
    return index.to_bytes(32, "big")


def test_an_empty_pool_chooses_nobody():
    pool = pool_of(0)
    assert pool.least_loaded(pool.available(), b"x") is None
    assert by_rendezvous(pool.available(), b"x") is None


def test_only_ready_replicas_with_a_fitting_model_are_available():
    pool = pool_of(3)
    first, second, third = pool.replicas
    first.ready = False
    second.info = "other"
    assert pool.available(suits=lambda info: info == "model") == [third]
    assert pool.available(excluded=[third]) == [second]


def test_a_replica_that_never_said_what_it_serves_is_not_available():
    pool: Pool[str] = Pool(Clock(), random.Random(7))
    pool.update(["http://new"])
    pool.replicas[0].probed(ready=True, info=None)
    assert pool.available() == []


def test_equal_prefixes_go_to_one_replica_while_it_has_room():
    pool = pool_of(4)
    chosen = {pool.least_loaded(pool.available(), b"conversation").url for _ in range(50)}  # type: ignore[union-attr]
    assert len(chosen) == 1


def test_the_preferred_replica_is_never_busier_than_the_slack_allows():
    """Soft affinity: one popular prefix spreads out instead of drowning its replica."""
    pool = pool_of(4)
    for _ in range(400):
        replica = pool.least_loaded(pool.available(), b"the same prefix for everybody")
        assert replica is not None
        replica.outstanding += 1
    loads = [replica.outstanding for replica in pool.replicas]
    assert max(loads) <= 1.4 * (sum(loads) / len(loads)) + AFFINITY_SLACK


def test_different_prefixes_spread_about_evenly():
    pool = pool_of(4)
    for index in range(400):
        replica = pool.least_loaded(pool.available(), key(index))
        assert replica is not None
        replica.outstanding += 1
    assert max(replica.outstanding for replica in pool.replicas) <= 125


def test_equal_images_meet_at_one_encoder():
    replicas = pool_of(5).available()
    assert len({by_rendezvous(replicas, key(3)).url for _ in range(20)}) == 1  # type: ignore[union-attr]


def test_images_spread_over_encoders():
    replicas = pool_of(4).available()
    counts = Counter(by_rendezvous(replicas, key(index)).url for index in range(400))  # type: ignore[union-attr]
    assert len(counts) == 4
    assert max(counts.values()) < 160


def test_an_encoder_above_its_share_is_passed_over():
    """Bounded load."""
    replicas = pool_of(3).available()
    favourite = by_rendezvous(replicas, key(1))
    assert favourite is not None
    favourite.outstanding = 10
    assert by_rendezvous(replicas, key(1)) is not favourite


def test_removing_an_encoder_moves_only_its_own_images():
    pool = pool_of(4)
    before = {index: by_rendezvous(pool.available(), key(index)) for index in range(200)}
    gone = pool.replicas[2]
    pool.update(replica.url for replica in pool.replicas if replica is not gone)
    for index, replica in before.items():
        if replica is not gone:
            assert by_rendezvous(pool.available(), key(index)) is replica


def test_an_update_keeps_what_is_known_about_a_replica_that_stays():
    pool = pool_of(2)
    stays = pool.replicas[1]
    stays.outstanding = 3
    pool.update([stays.url, "http://new", "http://new"])
    assert [replica.url for replica in pool.replicas] == [stays.url, "http://new"]
    assert pool.replicas[0] is stays


def test_a_lease_counts_while_it_is_held_even_if_the_work_fails():
    replica: Replica[str] = Replica("http://x")
    seen = []

    def work() -> None:
        with replica.lease():
            seen.append(replica.outstanding)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        work()
    assert seen == [1]
    assert replica.outstanding == 0


def test_three_failures_in_a_row_eject_a_replica_for_a_while():
    clock = Clock()
    pool = pool_of(2, clock)
    bad, good = pool.replicas
    pool.note(bad, BROKEN)
    pool.note(bad, BROKEN)
    assert bad in pool.available()
    pool.note(bad, BROKEN)
    assert pool.available() == [good]
    clock.now += 1.1
    assert bad in pool.available()
    pool.note(bad, BROKEN)
    clock.now += 1.1
    assert bad not in pool.available(), "the second ejection is longer"


def test_a_success_forgives_earlier_failures():
    pool = pool_of(2)
    shaky = pool.replicas[0]
    for _ in range(10):
        pool.note(shaky, BROKEN)
        pool.note(shaky, BROKEN)
        pool.note(shaky, None)
    assert shaky in pool.available()


def test_a_refusal_that_was_said_for_a_replica_is_no_success_of_it():
    pool = pool_of(2)
    full_and_broken = pool.replicas[0]
    for _ in range(3):
        pool.note(full_and_broken, QueueKnownFull("its queue is full"))
        pool.note(full_and_broken, BROKEN)
    assert full_and_broken not in pool.available()


def test_a_second_try_avoids_the_replica_that_failed_last_if_there_is_another():
    clock = Clock()
    pool = pool_of(2, clock)
    first, second = pool.replicas
    assert without_latest_failure(pool.available()) == [first, second]
    pool.note(first, BROKEN)
    clock.now += 1
    pool.note(second, BROKEN)
    assert without_latest_failure([first, second]) == [first]
    assert without_latest_failure([second]) == [second]
    assert without_latest_failure([]) == []


def test_what_is_wrong_with_a_request_does_not_count_against_the_replica():
    pool = pool_of(2)
    for _ in range(10):
        pool.note(pool.replicas[0], InvalidRequest("no such parameter"))
        pool.note(pool.replicas[0], EncodeFailed("not finite"))
        pool.note(pool.replicas[0], UpstreamTooLong("a line without an end"))
        pool.note(pool.replicas[0], asyncio.CancelledError())
    assert len(pool.available()) == 2
    assert not is_worth_another_replica(UpstreamTooLong("any other would say it, too"))


def test_a_replica_that_is_not_ready_is_out_until_a_probe_says_otherwise():
    pool = pool_of(2)
    starting = pool.replicas[0]
    pool.note(starting, NotReady("still loading"))
    assert starting not in pool.available()
    starting.probed(ready=True, info=None)
    assert starting in pool.available()


def test_a_replica_that_misses_a_row_of_probes_is_silent_and_everybody_concerned_hears_of_it_until_it_answers():
    pool = pool_of(2)
    hanging, other = pool.replicas
    told: list[Replica[str]] = []
    pool.on_silence(told.append)
    for _ in range(MAX_MISSED_PROBES):
        pool.missed_probe(hanging)
    assert (hanging.is_silent, told, hanging in pool.available()) == (False, [], True)
    pool.missed_probe(hanging)
    pool.missed_probe(hanging)
    assert (hanging.is_silent, told, pool.available()) == (True, [hanging, hanging], [other])
    pool.probed(hanging, ready=True, info="model")
    assert not hanging.is_silent
    pool.missed_probe(hanging)
    assert (len(told), hanging in pool.available()) == (2, True)


def test_a_replica_that_joins_gets_a_growing_share_and_in_the_end_its_own():
    clock = Clock()
    pool = pool_of(3, clock)
    newcomer = pool.replicas[0]
    pool.probed(newcomer, ready=False, info=None)
    pool.probed(newcomer, ready=True, info="model")
    shares = []
    for _ in range(4):
        for replica in pool.replicas:
            replica.outstanding = 0
        for index in range(300):
            chosen = pool.least_loaded(pool.available(), key(index))
            assert chosen is not None
            chosen.outstanding += 1
        shares.append(newcomer.outstanding)
        clock.now += SLOW_START_S / 2.5
    assert shares[0] < 30
    assert shares == sorted(shares)
    assert 85 <= shares[-1] <= 115


def test_replicas_that_start_together_share_from_the_first_request_on():
    clock = Clock()
    pool: Pool[str] = Pool(clock, random.Random(7))
    pool.update(["http://a", "http://b"])
    for replica in pool.replicas:
        pool.probed(replica, ready=True, info="model")
        clock.now += 0.5
    first, second = pool.replicas
    assert pool.loads(pool.replicas) == {first: 1.0, second: 1.0}


def test_ejections_end_after_a_bounded_time():
    clock = Clock()
    pool = pool_of(2, clock)
    for _ in range(50):
        pool.note(pool.replicas[0], BROKEN)
    clock.now += LONGEST_EJECTION_S
    assert len(pool.available()) == 2


def test_if_all_replicas_are_ejected_they_are_used_anyway():
    pool = pool_of(1)
    for _ in range(5):
        pool.note(pool.replicas[0], BROKEN)
    assert pool.available() == pool.replicas


@pytest.mark.parametrize(("scheme", "of_each"), [("dns", "http"), ("dns+https", "https")])
async def test_a_dns_address_gives_every_address_of_the_name(scheme: str, of_each: str):
    replicas = await resolve_replicas(f"{scheme}://localhost:8002")
    assert f"{of_each}://127.0.0.1:8002" in replicas
    assert all(replica.endswith(":8002") for replica in replicas)


@pytest.mark.parametrize("host", ["no-such-name.invalid", "text..engine", "x" * 64])
async def test_a_name_that_does_not_resolve_is_an_os_error(host: str):
    with pytest.raises(OSError):
        await resolve_replicas(f"dns://{host}:8002")
