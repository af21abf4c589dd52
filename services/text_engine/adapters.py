"""The LoRA adapters that requests can name, and how long each is needed. Lives in the engine's thread.

An adapter that is unloaded or replaced takes no new requests at once; its weights go when its last request has ended.
Numbers are never used again, so nothing that was computed with one adapter is taken for another's.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from services.text_engine.models.lora.adapter_files import AdapterFiles, AdapterIdentity
from shared.errors import InvalidRequest, ModelNotFound, Overloaded
from shared.wire.engine import AdapterInfo


class AdapterWeights(Protocol):
    """Who computes with them: `models.lora.adapted.LoadedAdapters`."""

    def put(self, number: int, files: AdapterFiles) -> None: ...

    def remove(self, number: int) -> None: ...


@dataclass(slots=True, eq=False)
class Adapter:
    """One that is in memory. number is above 0; is_served: new requests may name it"""

    identity: AdapterIdentity
    number: int
    created: int
    num_requests: int = 0
    is_served: bool = True


class Adapters:
    """weights   None: this engine has no adapters, and never will
    first     those that are in `weights` already, under the numbers 1, 2, …
    """

    def __init__(
        self,
        model: str,
        weights: AdapterWeights | None = None,
        *,
        max_loras: int = 0,
        first: Iterable[AdapterIdentity] = (),
    ) -> None:
        self._model = model
        self._weights = weights
        self._max_loras = max_loras
        self._by_name: dict[str, Adapter] = {}
        self._num_made = 0
        self._num_held = 0
        for identity in first:
            self._serve(identity)

    @property
    def infos(self) -> list[AdapterInfo]:
        """What requests can name; from any thread."""
        return [
            AdapterInfo(name=each.identity.name, root=each.identity.root, rank=each.identity.rank, created=each.created)
            for each in list(self._by_name.values())
        ]

    @property
    def num_held(self) -> int:
        """In memory: those that are served, and those whose last requests are running."""
        return self._num_held

    def find(self, name: str) -> Adapter:
        """From any thread. Raises ModelNotFound."""
        adapter = self._by_name.get(name)
        if adapter is None:
            there = ", ".join([self._model, *self._by_name])
            raise ModelNotFound(f"the model {name[:80]!r} does not exist here; there is {there}", param="model")
        return adapter

    def load(self, files: AdapterFiles, *, replace: bool = False) -> None:
        """Serve an adapter from now on. replace: one of its name may be there, whose requests then end with it.

        Raises InvalidRequest for a name that is taken, Overloaded where there is no room.
        """
        name = files.identity.name
        old = self._by_name.get(name)
        if name == self._model:
            raise InvalidRequest(f"{name!r} is the name of the model itself", param="lora_name")
        if old is not None and not replace:
            raise InvalidRequest(
                f"an adapter {name!r} is loaded; unload it first, or load it with load_inplace", param="lora_name"
            )
        is_freed = old is not None and not old.num_requests
        if self._num_held - is_freed >= self._max_loras:
            raise Overloaded(
                f"{self._num_held} adapters are in memory, those with running requests included; max_loras is "
                f"{self._max_loras}: unload one",
                retry_after_s=2.0,
            )
        assert self._weights is not None
        self._weights.put(self._num_made + 1, files)  # may fail, and then all is as before
        if old is not None:
            self.unload(name)
        self._serve(files.identity)

    def unload(self, name: str) -> None:
        """No new request gets it; running ones go on. Raises ModelNotFound."""
        adapter = self._by_name.pop(name, None)
        if adapter is None:
            loaded = ", ".join(self._by_name) or "none"
            raise ModelNotFound(f"no adapter {name[:80]!r} is loaded here; loaded: {loaded}", param="lora_name")
        adapter.is_served = False
        self._drop_if_done(adapter)

    def acquire(self, adapter: Adapter) -> None:
        """For a request, until `release`."""
        adapter.num_requests += 1

    def release(self, adapter: Adapter) -> None:
        adapter.num_requests -= 1
        self._drop_if_done(adapter)

    def _serve(self, identity: AdapterIdentity) -> None:
        self._num_made += 1
        self._num_held += 1
        self._by_name[identity.name] = Adapter(identity, self._num_made, int(time.time()))

    def _drop_if_done(self, adapter: Adapter) -> None:
        if adapter.is_served or adapter.num_requests:
            return
        assert self._weights is not None
        self._weights.remove(adapter.number)
        self._num_held -= 1
