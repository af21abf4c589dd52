"""CUDA graphs: what a function does to fixed memory, recorded once and done again in one launch. Imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Replay = Callable[[], torch.Tensor]


class Capture(Protocol):
    """Records what a function does to fixed memory, to do it again."""

    def record(self, run: Callable[[], torch.Tensor]) -> Replay:
        """The result's call does what `run` does, and returns the same tensor each time."""
        ...


class CudaCapture:
    """CUDA graphs that share one memory pool: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, run: Callable[[], torch.Tensor]) -> Replay:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()  # kernels are compiled and libraries set up outside of the capture
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Thread-local: NCCL's own threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay
