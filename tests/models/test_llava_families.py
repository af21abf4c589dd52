"""LLaVA's relatives against transformers: row counts for every size, every row's numbers, and whole answers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from services.vision_encoder.errors import UnsupportedCheckpoint
from services.vision_encoder.families.interface import Family, PreparedImage
from services.vision_encoder.families.registry import load_family
from tests.checkpoints import NUM_TEXT_TOKENS
from tests.conftest import CheckpointFactory
from tests.llava_checkpoints import load_processor
from tests.models.oracle import load_oracle, oracle_greedy
from tests.models.split_system import NUM_NEW_TOKENS, SplitSystem, picture
from tests.models.test_towers import copied, relative_error

FP32, CPU, WHITE = torch.float32, torch.device("cpu"), (255, 255, 255)
ANYRES = ["llava_next_vicuna", "llava_next_mistral", "llava_next_siglip", "llava_onevision", "llava_onevision_max_2"]
REAL_SIZES = ["llava_next_336", "llava_onevision_384"]
EXTREMES = [(1, 1), (1, 499), (499, 1), (500, 19), (19, 500), (2000, 3), (8192, 64), (64, 8192), (4096, 4096)]
SIZES = [*EXTREMES[:6], (55, 56), (57, 56), (56, 57), (112, 112), (113, 55), (97, 211), (211, 97), (168, 56)]
SIZES += [(333, 333), (640, 480)]
Parts = list[str | Image.Image]


def loaded(folder: Path) -> Family:
    family = load_family(folder)
    family.prepare_weights(CPU, FP32)
    return family


def prepared(family: Family, image: Image.Image) -> PreparedImage:
    return PreparedImage(torch.from_numpy(family.preprocessing.apply(image)), *image.size)


@torch.inference_mode()
def reference_rows(folder: Path, images: list[Image.Image]) -> list[torch.Tensor]:
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=FP32).eval()
    inputs = load_processor(folder).image_processor(images, return_tensors="pt")
    features: list[torch.Tensor] = model.get_image_features(**inputs).pooler_output
    return features


# --- how many rows (Cases C3, C4) -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*ANYRES, *REAL_SIZES])
def test_announced_rows_are_the_reference_processors_for_every_small_size_and_steps_to_2000(
    checkpoint: CheckpointFactory, name: str
):
    """Case C4."""
    folder = checkpoint(name)
    family, processor = load_family(folder), load_processor(folder)
    steps = [*range(65, 2001, 97), 335, 336, 337, 383, 385, 672, 1999]
    sizes = [*itertools.product(range(1, 65), repeat=2), *itertools.product(steps, repeat=2), *EXTREMES]
    wanted = processor._get_num_multimodal_tokens([(height, width) for width, height in sizes])["num_image_tokens"]
    assert [family.describe(*size).num_tokens for size in sizes] == wanted


@pytest.mark.parametrize(
    ("size", "num_tokens"),
    [
        ((400, 900), 1926),
        ((900, 400), 1896),
        ((336, 336), 1176),
        ((672, 672), 2928),
        ((1920, 1080), 1948),
        ((1024, 768), 2340),
        ((1000, 100), 1160),
        ((100, 1000), 1224),
        ((500, 19), 674),
        ((8192, 64), 576),
    ],
)
def test_llava_next_counts_as_worked_by_hand(checkpoint: CheckpointFactory, size: tuple[int, int], num_tokens: int):
    """Cases C3, C4."""
    assert load_family(checkpoint("llava_next_336")).describe(*size).num_tokens == num_tokens


@pytest.mark.parametrize("name", REAL_SIZES)
def test_announced_rows_are_encoded_rows_in_the_real_geometry(checkpoint: CheckpointFactory, name: str):
    family = loaded(checkpoint(name))

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(1, 2000), st.integers(1, 2000))
    def check(width: int, height: int) -> None:
        [rows] = family.encode([prepared(family, Image.new("RGB", (width, height)))])
        assert rows.shape == (family.describe(width, height).num_tokens, family.hidden_size)

    check()
    for width, height in EXTREMES[:-1]:
        check.hypothesis.inner_test(width, height)


# --- which rows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vip_llava", *ANYRES])
def test_every_row_equals_the_references_for_every_shape(checkpoint: CheckpointFactory, name: str):
    """Case C3: grids higher than wide and wider than high, the tiles' rows in order."""
    folder = checkpoint(name)
    family = loaded(folder)
    images = [picture(*size) for size in SIZES]
    for image, expected in zip(images, reference_rows(folder, images), strict=True):
        [rows] = family.encode([prepared(family, image)])
        assert rows.shape == expected.shape == (family.describe(*image.size).num_tokens, family.hidden_size)
        assert relative_error(rows, expected) < 1e-5, image.size


@pytest.mark.parametrize("name", ["llava_next_vicuna", "llava_onevision_max_2"])
def test_images_with_equally_many_tiles_in_other_grids_share_a_batch(checkpoint: CheckpointFactory, name: str):
    family = loaded(checkpoint(name))
    images = [prepared(family, picture(*size)) for size in [(110, 50), (50, 110), (111, 56)]]
    assert len({image.pixels.shape for image in images}) == 1
    for alone, together in zip((family.encode([image])[0] for image in images), family.encode(images), strict=True):
        assert relative_error(together, alone) < 1e-5


def test_a_mosaic_of_too_many_patches_is_scaled_down(checkpoint: CheckpointFactory):
    """As anyres_max_9 does with more than nine tiles; here it is two."""
    small, large = (load_family(checkpoint(f"llava_onevision{suffix}")) for suffix in ("_max_2", ""))
    assert large.describe(168, 168).num_tokens == 16 + 12 * 13
    assert small.describe(168, 168).num_tokens == 16 + 5 * 6
    assert small.describe(112, 56).num_tokens == large.describe(112, 56).num_tokens == 16 + 4 * 9


@pytest.mark.parametrize("name", ["vip_llava", "llava_next_vicuna", "llava_onevision_max_2"])
def test_bf16_stays_close_to_fp32(checkpoint: CheckpointFactory, name: str):
    exact, rough = loaded(checkpoint(name)), load_family(checkpoint(name))
    rough.prepare_weights(CPU, torch.bfloat16)
    [expected], [result] = (family.encode([prepared(family, picture(170, 90))]) for family in (exact, rough))
    assert result.dtype is torch.bfloat16
    assert torch.nn.functional.cosine_similarity(result.float(), expected, dim=-1).min() > 0.99


# --- whole answers ----------------------------------------------------------------------------------------------------


def reference_inputs(processor: Any, parts: Parts) -> dict[str, torch.Tensor]:
    """The images as those of one conversation, as `apply_chat_template` hands them on."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    images = [part for part in parts if not isinstance(part, str)]
    return dict(processor(text=text, images=[images] if images else None, return_tensors="pt"))


@pytest.mark.parametrize("name", ["vip_llava", *ANYRES, "llava_clip_mistral", "llava_siglip_qwen2"])
def test_greedy_answers_about_pictures_equal_those_of_transformers(checkpoint: CheckpointFactory, name: str):
    folder = checkpoint(name)
    system, oracle, processor = SplitSystem(folder), load_oracle(folder), load_processor(folder)
    # An engine never answers with a placeholder, nor with an id that is no token.
    oracle.generation_config.suppress_tokens = [*range(NUM_TEXT_TOKENS, oracle.config.text_config.vocab_size)]
    conversations: list[Parts] = [
        ["What is shown?", picture(97, 211)],
        [picture(211, 97), "Describe it."],
        [picture(60, 44, 1), "or", picture(1, 131, 2), "which is larger?"],
        ["No picture at all."],
    ]
    for parts in conversations:
        inputs = reference_inputs(processor, parts)
        assert system.prompt(parts).token_ids == inputs["input_ids"][0].tolist()
        assert system.answer(parts).token_ids == oracle_greedy(oracle, NUM_NEW_TOKENS, **inputs)


@pytest.mark.parametrize("layout", ["transformers", "nested"])
@pytest.mark.parametrize("name", ["vip_llava", "llava_next_vicuna", "llava_onevision"])
def test_every_spelling_of_the_names_is_the_same_model(checkpoint: CheckpointFactory, name: str, layout: str):
    published, other = SplitSystem(checkpoint(name)), SplitSystem(checkpoint(name, layout=layout))
    assert other.family.fingerprint(FP32, WHITE) == published.family.fingerprint(FP32, WHITE)
    question: Parts = ["What is shown?", picture(97, 211)]
    assert other.answer(question).token_ids == published.answer(question).token_ids


def test_the_fingerprint_covers_the_scaling(checkpoint: CheckpointFactory):
    prints = {load_family(checkpoint(f"llava_onevision{s}")).fingerprint(FP32, WHITE) for s in ("", "_max_2")}
    assert len(prints) == 2


# --- what stops the start ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "config", "reason"),
    [
        ("llava_next_vicuna", {"vision_feature_select_strategy": "full"}, "leaves 17 rows of a tile"),
        ("llava_next_siglip", {"vision_feature_select_strategy": "default"}, "leaves 15 rows of a tile"),
        ("llava_onevision", {"vision_aspect_ratio": "pad"}, "anyres_max_ and a number, not 'pad'"),
    ],
)
def test_a_checkpoint_whose_tiles_do_not_fit_together_stops_the_start(
    checkpoint: CheckpointFactory, tmp_path: Path, name: str, config: dict[str, Any], reason: str
):
    with pytest.raises(UnsupportedCheckpoint, match=reason):
        load_family(copied(checkpoint(name), tmp_path / "model", **config))


@pytest.mark.parametrize(
    ("processor", "reason"),
    [
        ({"size": {"shortest_edge": 40}}, "square tiles of one size"),
        ({"crop_size": {"height": 56, "width": 42}}, "square tiles of one size"),
        ({"image_grid_pinpoints": [[56, 60]]}, "whole tiles of 56"),
        ({"image_processor_type": "CLIPImageProcessor"}, "CLIPImageProcessor"),
    ],
)
def test_a_processor_that_makes_other_tiles_stops_the_start(
    checkpoint: CheckpointFactory, tmp_path: Path, processor: dict[str, Any], reason: str
):
    folder = copied(checkpoint("llava_next_vicuna"), tmp_path / "model")
    file = folder / "processor_config.json"
    fields = json.loads(file.read_text())
    fields["image_processor"] |= processor
    file.write_text(json.dumps(fields))
    with pytest.raises(UnsupportedCheckpoint, match=reason):
        load_family(folder)
