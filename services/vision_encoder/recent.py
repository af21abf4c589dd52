"""RecentEmbeddings: the last finished blobs, bounded by bytes, so that a dead Redis costs nobody a second encode."""

from __future__ import annotations

from collections import OrderedDict


class RecentEmbeddings:
    """Least recently used blobs leave first; a blob larger than the bound is not kept at all."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._blobs: OrderedDict[str, bytes] = OrderedDict()
        self.size_bytes = 0

    def get(self, key: str) -> bytes | None:
        blob = self._blobs.get(key)
        if blob is not None:
            self._blobs.move_to_end(key)
        return blob

    def put(self, key: str, blob: bytes) -> None:
        self.size_bytes += len(blob) - len(self._blobs.pop(key, b""))
        self._blobs[key] = blob
        while self.size_bytes > self._max_bytes:
            _, dropped = self._blobs.popitem(last=False)
            self.size_bytes -= len(dropped)
