"""What surrounds CUDA graphs, without a GPU: a graph that is a function run again, padded inputs, the same tokens."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from services.text_engine.runner.batch_tensors import BatchArrays, BatchTensors, Packing, to_tensors
from services.text_engine.runner.cuda_graphs import Graphs, graph_sizes
from tests.conftest import CheckpointFactory
from tests.engines import EngineDriver

CPU = torch.device("cpu")


class Rerun:
    """A `Capture` for any device: runs the function again, as it would a graph, and counts."""

    def __init__(self) -> None:
        self.num_replays = 0

    def record(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        output = run()

        def replay() -> torch.Tensor:
            self.num_replays += 1
            output.copy_(run())
            return output

        return replay


def tokens(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(length)]


def decode_step(num_seqs: int, num_blocks: int = 3, *, has_grid_positions: bool = False) -> BatchArrays:
    rng = np.random.default_rng(num_seqs)
    positions_shape = (3, num_seqs) if has_grid_positions else (num_seqs,)
    return BatchArrays(
        token_ids=rng.integers(0, 100, num_seqs),
        positions=rng.integers(0, 16 * num_blocks, positions_shape),
        sampling_rows=np.arange(0, num_seqs, 2),
        cu_seqlens_q=np.arange(num_seqs + 1, dtype=np.int32),
        seq_lens=rng.integers(1, 16 * num_blocks, num_seqs, dtype=np.int32),
        block_tables=rng.integers(0, 50, (num_seqs, num_blocks), dtype=np.int32),
        slot_mapping=rng.integers(0, 800, num_seqs),
    )


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20]), (32, [1, 2, 4, 8, 16, 24, 32])],
)
def test_sizes_go_up_to_the_largest_batch(max_num_seqs: int, sizes: list[int]):
    assert graph_sizes(max_num_seqs) == sizes


def test_a_step_runs_padded_to_the_next_size_with_its_inputs_in_place():
    seen: list[BatchTensors] = []

    def forward(tensors: BatchTensors) -> torch.Tensor:
        seen.append(tensors)
        return tensors.token_ids[:, None] * 10.0 + tensors.positions[:, None]

    graphs = Graphs(forward, [1, 2, 4, 8], max_blocks=5, device=CPU, capture=Rerun())
    assert [len(tensors.token_ids) for tensors in seen] == [8, 4, 2, 1]
    for num_seqs, num_blocks in ((5, 5), (3, 2), (8, 4), (1, 1), (4, 5)):
        arrays = decode_step(num_seqs, num_blocks)
        hidden, sampling_rows = graphs.run(arrays)
        assert hidden[:, 0].tolist() == (arrays.token_ids * 10.0 + arrays.positions).tolist()
        assert sampling_rows.tolist() == arrays.sampling_rows.tolist()
        attention, size = seen[-1].attention, len(seen[-1].token_ids)
        assert size == {5: 8, 3: 4, 8: 8, 1: 1, 4: 4}[num_seqs]
        padding = size - num_seqs
        assert attention.block_tables.shape == (size, 5)
        assert attention.block_tables[:num_seqs, :num_blocks].tolist() == arrays.block_tables.tolist()
        assert attention.seq_lens.tolist() == [*arrays.seq_lens.tolist(), *[0] * padding]
        assert attention.slot_mapping.tolist() == [*arrays.slot_mapping.tolist(), *[-1] * padding]
        assert attention.cu_seqlens_q.tolist() == [*range(num_seqs + 1), *[num_seqs] * padding]


def test_rows_of_several_tokens_are_padded_by_tokens_and_by_sequences():
    seen: list[BatchTensors] = []

    def forward(tensors: BatchTensors) -> torch.Tensor:
        seen.append(tensors)
        return tensors.token_ids[:, None] * 10.0

    graphs = Graphs(forward, [4, 8], max_blocks=3, device=CPU, capture=Rerun())
    six = decode_step(6)
    fields = {name: getattr(six, name) for name in BatchArrays.__slots__}
    arrays = BatchArrays(
        **fields
        | {
            "cu_seqlens_q": np.array([0, 1, 5, 6], dtype=np.int32),
            "seq_lens": np.array([7, 20, 3], dtype=np.int32),
            "block_tables": six.block_tables[:3],
        }
    )
    assert graphs.fit(arrays)
    hidden, _ = graphs.run(arrays)
    assert hidden[:, 0].tolist() == (arrays.token_ids * 10.0).tolist()
    attention = seen[-1].attention
    assert attention.slot_mapping.tolist() == [*arrays.slot_mapping.tolist(), -1, -1]
    assert attention.cu_seqlens_q.tolist() == [0, 1, 5, 6, 6, 6, 6, 6, 6]
    assert attention.seq_lens.tolist() == [7, 20, 3, 0, 0, 0, 0, 0]


def test_positions_of_three_coordinates_are_padded_too():
    seen: list[BatchTensors] = []

    def forward(tensors: BatchTensors) -> torch.Tensor:
        seen.append(tensors)
        return tensors.token_ids[:, None].float()

    graphs = Graphs(forward, [4], max_blocks=3, device=CPU, capture=Rerun(), has_grid_positions=True)
    arrays = decode_step(3, has_grid_positions=True)
    graphs.run(arrays)
    assert seen[-1].positions.tolist() == [[*row, 0] for row in arrays.positions.tolist()]


def test_only_decode_steps_of_a_captured_size_fit():
    graphs = Graphs(lambda tensors: tensors.token_ids[:, None], [1, 4], max_blocks=3, device=CPU, capture=Rerun())
    fits = decode_step(4)
    assert graphs.fit(fits)
    assert not graphs.fit(decode_step(5))
    assert not graphs.fit(decode_step(4, num_blocks=4))
    fields = {name: getattr(fits, name) for name in BatchArrays.__slots__}
    assert not graphs.fit(BatchArrays(**fields | {"num_image_rows": 1}))
    assert not graphs.fit(BatchArrays(**fields | {"image_spans": np.zeros((4, 2), dtype=np.int32)}))
    assert not graphs.fit(BatchArrays(**fields | {"token_ids": np.zeros(5, dtype=np.int64)}))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_graphs_give_the_tokens_of_the_eager_engine(checkpoint: CheckpointFactory, family: str, backend: str):
    answers = []
    for with_graphs in (False, True):
        driver = EngineDriver(checkpoint(family), attention_backend=backend, max_num_seqs=6, max_num_batched_tokens=32)
        capture = Rerun()
        if with_graphs:
            driver.engine.runner._forward_pass.capture(capture, graph_sizes(4), max_blocks=32)
        for i in range(6):
            driver.add(f"r{i}", tokens(3 + 11 * i, seed=i), max_tokens=6 + 5 * i)
        answers.append([answer.token_ids for answer in driver.run().values()])
        assert (capture.num_replays > 10) == with_graphs
    assert answers[0] == answers[1]


@pytest.mark.parametrize("num_seqs", [1, 3, 16])
def test_a_batch_in_one_buffer_is_the_batch(num_seqs: int):
    arrays = decode_step(num_seqs)
    parts = [arrays.token_ids, arrays.cu_seqlens_q, arrays.token_ids[:0], arrays.block_tables, arrays.slot_mapping]
    packing = Packing.of(parts)
    views = packing.views(packing.pack(parts, pin_memory=False).clone())
    assert [view.tolist() for view in views] == [part.tolist() for part in parts]
    assert all(view.data_ptr() % 16 == views[0].data_ptr() % 16 for view in views)
    assert to_tensors(arrays, CPU).attention.seq_lens.tolist() == arrays.seq_lens.tolist()
