"""One block's keys and values written over another's. Decided by the block manager, done by the runner."""

from __future__ import annotations

from typing import Literal, NamedTuple


class BlockCopy(NamedTuple):
    """source, target   blocks of the device or, where the direction says so, slots of the host"""

    source: int
    target: int
    direction: Literal["on_device", "to_host", "from_host"] = "on_device"
