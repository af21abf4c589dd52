"""One piece of work on some replica of a service: a replica that gives out is replaced by another.

Who chooses, what the work is and when it is too late for another try are the callers'.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from services.gateway.balancer import Info, Pool, Replica, is_replica_fault, is_worth_another_replica
from shared.errors import DiptychError

Result = TypeVar("Result")
MAX_FAULTS = 1  # replicas that may break over one piece of work before another is not worth the risk


async def on_a_replica(
    pool: Pool[Info],
    choose: Callable[[list[Replica[Info]], DiptychError], Replica[Info] | None],
    work: Callable[[Replica[Info], int], Awaitable[Result]],
    *,
    nobody: DiptychError,
) -> Result:
    """What `work` gives on the first replica where it succeeds; the pool hears of each failure.

    A replica that takes nothing (leaving, full) is passed over; one that breaks is replaced once. Raises the last
    refusal, or `nobody` if there was no replica to try.

    choose   from the replicas tried so far and the last one's refusal; None: there is no other
    work     gets the number of earlier tries. It tells the pool of its success, which may come after its result: an
             answer that has begun can still break
    """
    tried: list[Replica[Info]] = []
    num_faults = 0
    failure = nobody
    await pool.until_available()
    while (replica := choose(tried, failure)) is not None:
        try:
            return await work(replica, len(tried))
        except DiptychError as error:
            pool.note(replica, error)
            num_faults += is_replica_fault(error)
            if not is_worth_another_replica(error) or num_faults > MAX_FAULTS:
                raise
            failure = error
            tried.append(replica)
    raise failure
