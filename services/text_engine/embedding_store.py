"""Image embeddings inside the engine: asked for once per image however many requests wait for it, held while a request
may still need them (a preempted one does), forgotten afterwards within a byte bound.

Touched by the engine's thread only. Where embeddings come from is the business of whoever hears `on_wanted`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from services.text_engine.core.sequence import ImageSpan, Sequence
from shared.wire.images import ImageRef


@dataclass(slots=True)
class _Entry:
    """What is known of one image: who needs it, and its rows once they are here.

    ref     the newest word on who can serve it
    asked   the one that is being tried
    """

    ref: ImageRef
    needed_by: set[str] = field(default_factory=set)
    tensor: torch.Tensor | None = None
    asked: ImageRef | None = None


class EmbeddingStore:
    """Embeddings by image key, [num_tokens, row_size] each.

    on_wanted   called, from the engine's thread, when the rows of an image are needed and not here
    on_unwanted   alike, with the image's key, when no request is left that needs what is on its way
    max_idle_bytes   what may be kept of embeddings that no request needs any more
    """

    def __init__(
        self,
        on_wanted: Callable[[ImageRef], None],
        on_unwanted: Callable[[str], None] = lambda image_key: None,
        *,
        max_idle_bytes: int = 256 << 20,
    ) -> None:
        self._on_wanted = on_wanted
        self._on_unwanted = on_unwanted
        self._max_idle_bytes = max_idle_bytes
        self._entries: dict[str, _Entry] = {}
        self._idle: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._idle_bytes = 0
        self.num_queries = 0  # images that requests came with
        self.num_hits = 0  # those of them that were here

    @property
    def num_idle_bytes(self) -> int:
        """Of embeddings kept although no request needs them now."""
        return self._idle_bytes

    def register(self, request_id: str, refs: tuple[ImageRef, ...]) -> None:
        """Announce the images of a request before its sequences are scheduled."""
        for ref in refs:
            entry = self._entries.get(ref.image_key)
            if entry is None:
                entry = self._entries[ref.image_key] = _Entry(ref, tensor=self._take_idle(ref.image_key))
            elif ref.encoder_url not in (None, entry.ref.encoder_url):
                entry.ref = ref
            entry.needed_by.add(request_id)
            self.num_queries += 1
            self.num_hits += entry.tensor is not None

    def release(self, request_id: str, image_keys: Iterable[str]) -> None:
        """The request has ended."""
        for key in image_keys:
            entry = self._entries.get(key)
            if entry is None:
                continue
            entry.needed_by.discard(request_id)
            if not entry.needed_by:
                del self._entries[key]
                if entry.tensor is not None:
                    self._keep_idle(key, entry.tensor)
                elif entry.asked is not None:
                    self._on_unwanted(key)

    def is_ready(self, _sequence: Sequence, span: ImageSpan) -> bool:
        entry = self._entries[span.image_key]
        if entry.tensor is not None:
            return True
        if entry.asked is not entry.ref:  # nobody yet, or one that hangs: its picture has been encoded elsewhere
            self._ask(entry)
        return False

    def rows(self, image_key: str) -> torch.Tensor:
        tensor = self._entries[image_key].tensor
        assert tensor is not None, "the scheduler only schedules images that are ready"
        return tensor

    def needs(self, image_key: str) -> bool:
        return image_key in self._entries

    def put(self, image_key: str, tensor: torch.Tensor) -> None:
        """The rows have arrived; ignored if nobody needs them any more."""
        entry = self._entries.get(image_key)
        if entry is not None:
            entry.tensor = tensor

    def fetch_failed(self, ref: ImageRef) -> bool:
        """A fetch ended without rows. True: a reference with another source has come meanwhile and is being tried."""
        entry = self._entries.get(ref.image_key)
        if entry is None:
            return False
        if entry.asked == ref:
            entry.asked = None
            if entry.ref != ref:
                self._ask(entry)
        return entry.asked is not None

    def _ask(self, entry: _Entry) -> None:
        entry.asked = entry.ref
        self._on_wanted(entry.ref)

    def drop_idle(self) -> None:
        """Forget the embeddings that no request needs now."""
        self._idle.clear()
        self._idle_bytes = 0

    def _take_idle(self, key: str) -> torch.Tensor | None:
        tensor = self._idle.pop(key, None)
        if tensor is not None:
            self._idle_bytes -= tensor.nbytes
        return tensor

    def _keep_idle(self, key: str, tensor: torch.Tensor) -> None:
        self._take_idle(key)
        self._idle[key] = tensor
        self._idle_bytes += tensor.nbytes
        while self._idle_bytes > self._max_idle_bytes:
            _, oldest = self._idle.popitem(last=False)
            self._idle_bytes -= oldest.nbytes
