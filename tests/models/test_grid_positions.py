"""Rotary positions of three coordinates against transformers', for every way of cutting a prompt."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from services.text_engine.core.sequence import ImageSpan
from services.text_engine.models.config import RopeConfig
from services.text_engine.models.rope import cos_sin_at, cos_sin_table
from services.text_engine.runner.grid_positions import grid_positions
from tests.conftest import CheckpointFactory

Grid = tuple[int, int]


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def reference(request: pytest.FixtureRequest, checkpoint: CheckpointFactory) -> Any:
    folder: Path = checkpoint(request.param, layout="transformers")
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).model


def expected(model: Any, num_texts: list[int], grids: list[Grid], num_generated: int) -> np.ndarray[Any, Any]:
    """[3, prompt and answer]: texts with an image after each but the last."""
    kinds: list[int] = []
    for i, num_text in enumerate(num_texts):
        kinds += [0] * num_text
        if i < len(grids):
            kinds += [1] * (grids[i][0] * grids[i][1])
    types = torch.tensor([kinds])
    images = torch.tensor([[1, 2 * lines, 2 * columns] for lines, columns in grids])  # in patches: 2 x 2 a cell
    prompt, delta = model.get_rope_index(torch.zeros_like(types), types, image_grid_thw=images)
    answer = torch.arange(len(kinds), len(kinds) + num_generated) + delta
    return torch.cat((prompt[:, 0], answer.expand(3, -1)), dim=1).numpy()


def spans(num_texts: list[int], grids: list[Grid]) -> list[ImageSpan]:
    result, position = [], 0
    for num_text, (lines, columns) in zip(num_texts, grids, strict=False):
        position += num_text
        result.append(ImageSpan("a" * 64, position, lines * columns, grid=(1, lines, columns)))
        position += lines * columns
    return result


@pytest.mark.parametrize(
    ("num_texts", "grids"),
    [
        ([5, 7], [(3, 4)]),
        ([1, 1], [(1, 1)]),
        ([4, 1, 2, 9], [(2, 6), (5, 1), (1, 7)]),
        ([3, 2], [(9, 2)]),
    ],
)
def test_positions_are_the_references_however_the_prompt_is_cut(
    reference: Any, num_texts: list[int], grids: list[Grid]
):
    want = expected(reference, num_texts, grids, num_generated=6)
    images = spans(num_texts, grids)
    for start, end in itertools.combinations(range(want.shape[1] + 1), 2):
        assert np.array_equal(grid_positions(images, start, end), want[:, start:end]), (start, end)


def test_random_prompts_have_the_references_positions_token_by_token(reference: Any):
    rng = random.Random(3)
    for _ in range(20):
        grids = [(rng.randint(1, 8), rng.randint(1, 8)) for _ in range(rng.randint(1, 4))]
        num_texts = [rng.randint(1, 9) for _ in range(len(grids) + 1)]
        want = expected(reference, num_texts, grids, num_generated=3)
        images = spans(num_texts, grids)
        decoded = [grid_positions(images, i, i + 1) for i in range(want.shape[1])]
        assert np.array_equal(np.concatenate(decoded, axis=1), want)


def test_text_has_its_ordinary_positions_in_all_three_coordinates():
    assert np.array_equal(grid_positions((), 5, 9), np.tile(np.arange(5, 9), (3, 1)))


def test_each_section_of_the_frequencies_turns_with_its_coordinate():
    table = cos_sin_table(RopeConfig(10_000.0), 16, 40, torch.device("cpu"))
    positions = torch.tensor([[3, 30], [7, 31], [11, 32]])
    rows = cos_sin_at(table, positions, RopeConfig(10_000.0, sections=(2, 3, 3)))
    for token in range(2):
        frame, line, column = positions[:, token].tolist()
        for half in (0, 8):  # cosines, sines
            assert torch.equal(rows[token, half : half + 2], table[frame, half : half + 2])
            assert torch.equal(rows[token, half + 2 : half + 5], table[line, half + 2 : half + 5])
            assert torch.equal(rows[token, half + 5 : half + 8], table[column, half + 5 : half + 8])


@pytest.mark.parametrize("sections", [(24, 20, 20), (22, 21, 21), (2, 3, 3), (4, 2, 2), (8, 0, 0)])
def test_interleaved_sections_are_the_references_to_the_last_bit(sections: tuple[int, ...]):
    head_dim = 2 * sum(sections)
    config = transformers.Qwen3VLTextConfig(
        head_dim=head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": list(sections)},
    )
    positions = torch.randint(0, 60, (3, 17), generator=torch.Generator().manual_seed(2))
    cos, sin = Qwen3VLTextRotaryEmbedding(config)(torch.zeros(1), positions[:, None])
    rope = RopeConfig(10_000.0, sections=sections, interleaved=True)
    rows = cos_sin_at(cos_sin_table(rope, head_dim, 60, torch.device("cpu")), positions, rope)
    half = head_dim // 2
    torch.testing.assert_close(rows, torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1), rtol=0, atol=0)
