"""Pictures in low detail: the cheapest reading of each family, against transformers where it has the same; several
pictures in one LLaVA-OneVision conversation are read so, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from services.vision_encoder.families.registry import load_family
from tests.conftest import CheckpointFactory
from tests.llava_checkpoints import load_processor as load_llava_processor
from tests.models.split_system import Oracle, SplitSystem, all_features, load_processor, picture
from tests.models.test_towers import copied, relative_error

FP32, WHITE = torch.float32, (255, 255, 255)
SIZES = [(1, 1), (1, 131), (131, 1), (55, 57), (56, 56), (211, 97), (97, 211), (513, 511), (700, 560)]
OF_ANY_SIZE = ["pixtral", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
WITH_A_CHOICE = ["llava_next_vicuna", "llava_next_siglip", "llava_onevision", "smolvlm", "internvl", *OF_ANY_SIZE]
WITHOUT = ["llava_clip_llama", "llava_siglip_qwen2", "vip_llava", "gemma3", "smolvlm_unsplit"]


@pytest.fixture
def folder_of(checkpoint: CheckpointFactory, tmp_path: Path) -> Any:
    """A checkpoint's folder; of the families without sizes of their own one that takes pictures beyond 512 x 512."""

    def get(name: str) -> Path:
        if name not in OF_ANY_SIZE:
            return checkpoint(name)
        folder = checkpoint(name, layout="transformers")
        vision = json.loads((folder / "config.json").read_text())["vision_config"]
        wide = copied(folder, tmp_path / name, vision_config=vision | {"image_size": 1024})
        file = wide / "processor_config.json"
        fields = json.loads(file.read_text())
        fields["image_processor"]["size"]["longest_edge"] = 1024 if name == "pixtral" else 1024 * 1024
        file.write_text(json.dumps(fields))
        return wide

    return get


@torch.inference_mode()
def reference_rows(folder: Path, name: str, image: Image.Image) -> torch.Tensor:
    """transformers, told to be cheap in the way that it has for this family."""
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=FP32).eval()
    if name.startswith("llava_next"):
        # It has no such setting, but its model knows pictures of one tile: that one, and the end of a line.
        inputs = load_llava_processor(folder).image_processor(image, return_tensors="pt")
        [rows] = model.get_image_features(**inputs).pooler_output
        tile = rows[: (56 // 14) ** 2]
        [[packed], _] = model.model.pack_image_features(
            [tile[None]], inputs["image_sizes"], "default", image_newline=model.model.image_newline
        )
        return packed
    if name == "llava_onevision":
        inputs = load_llava_processor(folder).image_processor([[image, image]], return_tensors="pt")
        return model.get_image_features(**inputs).pooler_output[0]
    cheap: dict[str, Any] = {
        "smolvlm": {"do_image_splitting": False},
        "internvl": {"crop_to_patches": False},
        "pixtral": {"size": {"longest_edge": 512}},
        "qwen2_vl": {"size": {"shortest_edge": 32 * 32, "longest_edge": 512 * 512}},
        "qwen2_5_vl": {"size": {"shortest_edge": 32 * 32, "longest_edge": 512 * 512}},
        "qwen3_vl": {"size": {"shortest_edge": 32 * 32, "longest_edge": 512 * 512}},
    }[name]
    processor = load_processor(folder)
    mark = processor.tokenizer.convert_ids_to_tokens(processor.image_token_id)
    inputs = processor(text=mark, images=[image], return_tensors="pt", **cheap)
    names = ("pixel_values", "image_sizes", "image_grid_thw", "pixel_attention_mask")
    return all_features(model.model.get_image_features(**{key: inputs[key] for key in names if key in inputs}))


@pytest.mark.parametrize("name", WITH_A_CHOICE)
def test_rows_in_low_detail_are_the_references_told_to_be_cheap(folder_of: Any, name: str):
    folder = folder_of(name)
    system = SplitSystem(folder)
    for size in [(97, 211), (700, 560)]:
        image = picture(*size)
        expected, rows = reference_rows(folder, name, image), system.encode(image, "low")
        assert rows.shape == expected.shape, size
        assert relative_error(rows, expected) < 1e-5, size


@pytest.mark.parametrize("name", WITH_A_CHOICE)
def test_low_detail_is_announced_exactly_and_is_the_cheaper_one(folder_of: Any, name: str):
    system = SplitSystem(folder_of(name))
    high, low = system.families["high"], system.families["low"]
    assert low is not high
    assert low.describe(700, 560).num_tokens < high.describe(700, 560).num_tokens

    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(1, 900), st.integers(1, 900))
    def holds(width: int, height: int) -> None:
        rows = system.encode(Image.new("RGB", (width, height), (width % 256, height % 256, 90)), "low")
        assert rows.shape == (low.describe(width, height).num_tokens, low.num_row_parts * low.hidden_size)

    holds()
    for size in SIZES:
        assert len(system.encode(Image.new("RGB", size), "low")) == low.describe(*size).num_tokens
        # Of a sliver nothing may be left between its bars, not even the one line end of a single tile.
        assert low.describe(*size).num_tokens <= high.describe(*size).num_tokens + 1


@pytest.mark.parametrize("name", WITH_A_CHOICE)
def test_readings_share_weights_and_nothing_else(folder_of: Any, name: str):
    """Case E5: other keys, so that neither reading is ever found in the place of the other."""
    high = load_family(folder_of(name))
    low = high.low_detail
    assert low is not None
    assert low.low_detail is None or low.low_detail.fingerprint(FP32, WHITE) == low.fingerprint(FP32, WHITE)
    assert low.fingerprint(FP32, WHITE) != high.fingerprint(FP32, WHITE)
    assert high.low_detail is not None
    assert high.low_detail.fingerprint(FP32, WHITE) == low.fingerprint(FP32, WHITE)
    assert high.reads_several_in_low_detail == (name == "llava_onevision")


@pytest.mark.parametrize("name", [*WITHOUT, *OF_ANY_SIZE])
def test_a_family_that_is_as_cheap_as_it_can_be_has_one_reading(checkpoint: CheckpointFactory, name: str):
    """The last ones as the tiny checkpoints have them: no picture exceeds 96 pixels a side anyway."""
    assert load_family(checkpoint(name)).low_detail is None


def test_pictures_of_one_detail_share_a_batch(folder_of: Any):
    system = SplitSystem(folder_of("llava_onevision"))
    images = [picture(90, 61), picture(61, 90, 1), picture(3, 200, 2)]
    together = system.families["low"].encode([system.prepared(image, "low") for image in images])
    for image, rows in zip(images, together, strict=True):
        assert relative_error(rows, system.encode(image, "low")) < 1e-5


def test_whole_answers_in_low_detail_are_those_of_transformers(checkpoint: CheckpointFactory):
    """SmolVLM's layout is another one, too: the whole picture stands alone between its marks."""
    folder = checkpoint("smolvlm")
    cheap, system = Oracle(folder), SplitSystem(folder)
    cheap.processor.image_processor.do_image_splitting = False
    for parts in (["What?", picture(211, 97)], [picture(60, 44, 1), "or", picture(17, 130, 2), "?"]):
        assert system.prompt(parts, "low").token_ids == cheap.inputs(parts)["input_ids"][0].tolist()
        assert system.answer(parts, "low").token_ids == cheap.answer(parts)
        assert system.prompt(parts, "low").token_ids != system.prompt(parts, "high").token_ids
