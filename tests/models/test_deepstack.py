"""Rows that several of the text model's layers are given (Qwen3-VL): that they matter, and who pays for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from services.text_engine.models.expert_tensors import SeparateExperts
from services.text_engine.models.load_config import load_model_config
from services.text_engine.runner.cuda_graphs import graph_sizes
from services.vision_encoder.encoder import to_blob
from shared.row_codec import dequantize_rows
from shared.torch_io import Checkpoint, blob_to_tensor
from tests.conftest import CheckpointFactory
from tests.models.split_system import SplitSystem, picture
from tests.models.test_cuda_graphs import Rerun

HIDDEN_SIZE, NUM_PARTS = 64, 3
QUESTION = ["Look: ", picture(60, 44), " what?"]


@pytest.fixture
def folder(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("qwen3_vl")


def widths_of_steps(system: SplitSystem) -> list[int]:
    """What the decoder is handed in each step from now on; filled as it runs."""
    decoder = system.driver.engine.runner._forward_pass._decoder
    widths: list[int] = []
    forward = decoder.forward

    def recorded(hidden: torch.Tensor, *rest: object) -> torch.Tensor:
        widths.append(hidden.shape[1])
        return forward(hidden, *rest)  # type: ignore[arg-type]

    decoder.forward = recorded  # type: ignore[method-assign]
    return widths


@pytest.mark.parametrize("which", [0, 1, 2])
def test_every_part_of_a_row_counts(folder: Path, which: int):
    """Without one of them the answer would be another: the comparison with transformers would not be fooled."""
    expected = SplitSystem(folder).answer(QUESTION).token_ids
    system = SplitSystem(folder)
    system.prompt(QUESTION)  # encodes
    [(key, rows)] = system.driver.pictures.items()
    system.driver.pictures[key] = without = rows.clone()
    without[:, which * HIDDEN_SIZE : (which + 1) * HIDDEN_SIZE] = 0
    assert system.answer(QUESTION).token_ids != expected


def test_only_steps_with_a_pictures_rows_carry_more_than_the_hidden_size(folder: Path):
    system = SplitSystem(folder)
    widths = widths_of_steps(system)
    long_question = [*QUESTION, " Describe the colours." * 3]
    answer = system.answer(long_question)
    assert widths == [NUM_PARTS * HIDDEN_SIZE] + [HIDDEN_SIZE] * (len(answer.token_ids) - 1)
    widths.clear()
    system.answer(QUESTION[:1])
    system.answer([*long_question, "And then?"])  # the picture's keys and values are in the prefix cache
    assert set(widths) == {HIDDEN_SIZE}


def test_a_chunk_of_a_picture_carries_its_rows_and_a_chunk_of_text_none(folder: Path):
    system = SplitSystem(folder, max_num_batched_tokens=16, max_num_seqs=4)
    prompt = system.prompt(QUESTION)
    [span] = prompt.images
    widths = widths_of_steps(system)
    system.answer(QUESTION, max_tokens=1)
    steps = [range(start, start + 16) for start in range(0, len(prompt.token_ids), 16)]
    has_rows = [step.start < span.end and span.start < step.stop for step in steps]
    assert widths == [NUM_PARTS * HIDDEN_SIZE if has else HIDDEN_SIZE for has in has_rows]
    assert has_rows.count(False)
    assert has_rows.count(True) > 1


def test_text_beside_a_picture_is_answered_as_alone(folder: Path):
    alone = SplitSystem(folder).answer(["What is shown?"]).token_ids
    system = SplitSystem(folder)
    system.add("picture", QUESTION)
    system.add("text", ["What is shown?"])
    assert system.driver.run()["text"].token_ids == alone


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_decode_steps_run_as_graphs_and_steps_with_pictures_do_not(folder: Path, backend: str):
    eager = SplitSystem(folder, attention_backend=backend)
    captured = SplitSystem(folder, attention_backend=backend)
    capture = Rerun()
    captured.driver.engine.runner._forward_pass.capture(capture, graph_sizes(4), max_blocks=32)
    assert captured.answer(QUESTION).token_ids == eager.answer(QUESTION).token_ids
    num_steps = sum(not batch.is_empty for batch in captured.driver.batches)
    assert capture.num_replays == num_steps - 1  # but for the prompt's


# --- stored in small numbers ------------------------------------------------------------------------------------------


def test_each_part_is_stored_with_a_scale_of_its_own(folder: Path):
    system = SplitSystem(folder)
    rows = system.encode(picture(60, 44))
    stored = blob_to_tensor(bytearray(to_blob(rows, "int8", system.family.num_row_parts)))
    assert stored.shape == (len(rows), NUM_PARTS * (HIDDEN_SIZE + 4))
    parts = rows.unflatten(1, (NUM_PARTS, -1))
    half_a_step = parts.abs().amax(dim=2, keepdim=True) / 254 * (1 + 1e-5)
    assert ((dequantize_rows(stored, NUM_PARTS).view_as(parts) - parts).abs() <= half_a_step).all()


# --- a mixture's experts as they are published ------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["published", "transformers"])
def test_experts_are_read_alike_whichever_way_round_they_are_stored(checkpoint: CheckpointFactory, layout: str):
    """In parts, too, as the ranks of a tensor-parallel model read them."""
    folder = checkpoint("qwen3_vl_moe", layout=layout)
    as_in_memory = load_file(checkpoint("qwen3_vl_moe", layout="transformers") / "model.safetensors")
    checkpoint_files = SeparateExperts(Checkpoint(folder), load_model_config(folder).hidden_size)
    prefix = "model.language_model.layers.0.mlp.experts"
    gate_up, down = as_in_memory[f"{prefix}.gate_up_proj"], as_in_memory[f"{prefix}.down_proj"]
    for expert in range(5):
        gate, up = gate_up[expert].chunk(2)
        for name, matrix in (("gate_proj", gate), ("up_proj", up), ("down_proj", down[expert])):
            full_name = f"{prefix}.{expert}.{name}.weight"
            assert checkpoint_files.shape(full_name) == tuple(matrix.shape)
            tensor = checkpoint_files.tensor(full_name)
            assert torch.equal(tensor, matrix)
            assert tensor.is_contiguous()
            assert torch.equal(checkpoint_files.part(full_name, (slice(3, 11),)), matrix[3:11])
            assert torch.equal(checkpoint_files.part(full_name, (slice(None), slice(5, 17))), matrix[:, 5:17])
