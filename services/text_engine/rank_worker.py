"""A rank but the first of a tensor-parallel model: `python -m services.text_engine.rank_worker SOCKET`.

Started by rank 0. Loads its part of the checkpoint, then runs the forward pass of every step that rank 0 sends. Ends
when told to, and at once when rank 0 is gone. The socket is rank 0's own: it was inherited, so what comes through it
may be unpickled.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Final

import torch

from services.text_engine.models.load_config import load_model_config
from services.text_engine.runner.batch_tensors import BatchArrays
from services.text_engine.runner.kv_cache import BLOCK_SIZE
from services.text_engine.runner.loading import load_model, rank_device
from services.text_engine.runner.tensor_parallel import ProcessRanks, RankSpec, end_without_cleanup
from shared.log import configure_logging, get_logger

log = get_logger(__name__)
IDLE_AFTER_S: Final = 0.02  # longer than rank 0 takes between two steps of a busy engine


def main() -> None:
    # Ctrl-C and a supervisor's SIGTERM reach the whole process group; when this rank ends is rank 0's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    spec: RankSpec = connection.recv()
    configure_logging(f"text-engine rank {spec.index}", spec.settings.log_level, spec.settings.log_format)
    try:
        _work(connection, spec)
    except Exception as error:  # whatever it was, rank 0 sees this process end
        expected = isinstance(error, ValueError | OSError)
        log.error("this rank of the model failed", reason=str(error), exc_info=None if expected else error)
        end_without_cleanup(1)


def _work(connection: Connection, spec: RankSpec) -> None:
    steps: queue.SimpleQueue[BatchArrays | None] = queue.SimpleQueue()
    connection.send(os.getpid())
    threading.Thread(target=_read, args=(connection, steps), name="steps", daemon=True).start()
    device = rank_device(spec.settings, spec.index)
    ranks = ProcessRanks(spec.index, spec.size, spec.store, device)
    config = load_model_config(spec.settings.model, spec.settings.model_implementation)
    model = load_model(spec.settings, config, device, ranks)
    num_used_blocks = 0
    while (arrays := next_step(steps, partial(model.forward_pass.prepare_memory, num_used_blocks))) is not None:
        model.forward_pass.run(arrays, _no_images)
        num_used_blocks = max(num_used_blocks, int(arrays.slot_mapping.max(initial=-1)) // BLOCK_SIZE + 1)
    end_without_cleanup(0)


def next_step(steps: queue.SimpleQueue[BatchArrays | None], prepare: Callable[[], bool]) -> BatchArrays | None:
    """Waits for it; whenever none has come for a while, does one more piece of what `prepare` has for idle times.

    prepare   False: nothing is left
    """
    while True:
        try:
            return steps.get(timeout=IDLE_AFTER_S)
        except queue.Empty:
            if not prepare():
                return steps.get()


def _read(connection: Connection, steps: queue.SimpleQueue[BatchArrays | None]) -> None:
    """A thread of its own: the main one may be waiting for rank 0 in a collective when rank 0 dies."""
    with contextlib.suppress(EOFError, OSError):
        while (arrays := connection.recv()) is not None:
            steps.put(arrays)
        steps.put(None)
        return
    log.error("rank 0 of the model is gone: this rank ends, too")
    end_without_cleanup(1)


def _no_images(_hidden: torch.Tensor) -> None:
    """Rank 0 puts the images' rows where they belong before it shares them."""


if __name__ == "__main__":
    main()
