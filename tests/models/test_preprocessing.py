"""Preprocessing against the checkpoints' own Hugging Face processors: the same numbers, for every shape of picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from services.vision_encoder.errors import UnsupportedCheckpoint
from services.vision_encoder.families.features import normalize
from services.vision_encoder.preprocessing.interface import Preprocessing
from services.vision_encoder.preprocessing.registry import from_json, to_json
from services.vision_encoder.preprocessing.single_tile import load_single_tile
from services.vision_encoder.resample import FILTERS, resize_window

CLIP_336 = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
SIGLIP_384 = {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14}

# Width x height: tiny, slivers, primes, target +- 1, exact, large, and the cases' own (A7, A8).
SIZES = [(1, 1), (3, 1), (1, 3), (3, 3), (2, 7), (499, 1), (1, 499), (500, 19), (19, 500), (31, 1)]
SIZES += [(8192, 64), (64, 8192), (335, 336), (336, 335), (336, 336), (337, 336), (336, 337), (337, 337), (672, 672)]
SIZES += [(383, 384), (384, 384), (385, 384), (101, 103), (97, 211), (211, 97), (640, 480), (480, 640), (1000, 100)]
SIZES += [(100, 1000), (1009, 757), (1920, 1080), (333, 667), (667, 333), (50, 51), (51, 50), (224, 225), (640, 641)]
SIZES += [(1024, 768), (1531, 2111)]


def picture(width: int, height: int) -> Image.Image:
    random = np.random.default_rng(width * 10_007 + height)
    return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))


def ours(preprocessing: Preprocessing, image: Image.Image) -> torch.Tensor:
    """[1, 3, height, width]"""
    return normalize(torch.from_numpy(preprocessing.apply(image)), preprocessing)


def processor_folder(tmp_path: Path, **fields: Any) -> Path:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    return tmp_path


def assert_equal_to_reference(processor: Any, preprocessing: Preprocessing, sizes: list[tuple[int, int]]) -> None:
    for width, height in sizes:
        image = picture(width, height)
        reference = processor(image, return_tensors="pt")["pixel_values"]
        result = ours(preprocessing, image)
        assert result.shape == reference.shape, (width, height)
        assert (result - reference).abs().max() < 1e-6, (width, height)


def test_clip_pictures_of_every_shape_equal_the_reference(tmp_path: Path) -> None:
    processor = transformers.CLIPImageProcessorPil(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336})
    processor.save_pretrained(tmp_path)
    assert_equal_to_reference(processor, load_single_tile(tmp_path, CLIP_336), SIZES)


def test_siglip_pictures_of_every_shape_equal_the_reference(tmp_path: Path) -> None:
    processor = transformers.SiglipImageProcessorPil(size={"height": 384, "width": 384})
    processor.save_pretrained(tmp_path)
    assert_equal_to_reference(processor, load_single_tile(tmp_path, SIGLIP_384), SIZES)


@pytest.mark.parametrize("changes", [{"size": {"shortest_edge": 300}}, {"size": {"height": 400, "width": 351}}])
def test_a_crop_larger_or_smaller_than_the_resized_picture_equals_the_reference(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """A crop beyond the picture is filled with black, before normalising."""
    processor = transformers.CLIPImageProcessorPil(**{"crop_size": {"height": 337, "width": 335}} | changes)
    processor.save_pretrained(tmp_path)
    assert_equal_to_reference(processor, load_single_tile(tmp_path, CLIP_336), SIZES[-12:])


@pytest.mark.parametrize(
    "changes",
    [
        {"resample": 2},
        {"do_normalize": False},
        {"do_rescale": False},
        {"rescale_factor": 1 / 127.5},
        {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]},
    ],
)
def test_unusual_settings_of_a_processor_are_followed(tmp_path: Path, changes: dict[str, Any]) -> None:
    processor = transformers.CLIPImageProcessorPil(
        **{"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}} | changes
    )
    processor.save_pretrained(tmp_path)
    assert_equal_to_reference(processor, load_single_tile(tmp_path, CLIP_336), SIZES[-10:])


@pytest.mark.parametrize("pads", [True, False])
def test_padding_to_a_square_happens_only_where_the_checkpoint_says_so(tmp_path: Path, pads: bool) -> None:
    """Case C14: red only in the left tenth; a crop loses it, padding keeps it between bars of the mean colour."""
    square = {"height": 336, "width": 336}
    processor = transformers.LlavaImageProcessorPil(size={"shortest_edge": 336}, crop_size=square, do_pad=pads)
    processor.save_pretrained(tmp_path)
    preprocessing = load_single_tile(tmp_path, CLIP_336)
    assert_equal_to_reference(processor, preprocessing, [(1000, 100), (101, 103), (335, 336), (64, 640), (50, 50)])
    image = Image.new("RGB", (1000, 100), (0, 0, 0))
    image.paste((255, 0, 0), (0, 0, 100, 100))
    has_red = (preprocessing.apply(image)[0, 0] > 250).any()
    assert has_red == pads


def test_slivers_are_resized_only_inside_their_crop_and_equal_the_reference(tmp_path: Path) -> None:
    """Exactly Pillow's bytes, although the whole resized picture would have 56 million and 1.2 billion pixels."""
    for resample in FILTERS:
        for size in [(499, 1), (1, 499), (1201, 3), (5, 1409)]:
            image = picture(*size)
            fields = {"image_processor_type": "CLIPImageProcessor", "resample": resample}
            preprocessing = load_single_tile(processor_folder(tmp_path, **fields), CLIP_336)
            width, height = preprocessing.resized_size(*image.size)
            left, top = (width - 336) // 2, (height - 336) // 2
            box = (left, top, left + 336, top + 336)
            whole = image.resize((width, height), Image.Resampling(resample)).crop(box)
            assert np.array_equal(resize_window(image, (width, height), box, resample), np.asarray(whole))
    assert preprocessing.apply(picture(65_000, 1)).shape == (1, 3, 336, 336)


@pytest.mark.parametrize("size", [(1, 1), (3, 1), (1, 3), (499, 1), (1, 499), (3, 3)])
def test_channel_order_is_stated_and_never_guessed_from_the_shape(tmp_path: Path, size: tuple[int, int]) -> None:
    """Case A7."""
    preprocessing = load_single_tile(tmp_path, CLIP_336)
    pixels = preprocessing.apply(Image.new("RGB", size, (10, 20, 30)))
    assert pixels.shape == (1, 3, 336, 336)
    assert [int(channel.min()) for channel in pixels[0]] == [10, 20, 30]
    assert torch.isfinite(ours(preprocessing, Image.new("RGB", size))).all()


# --- where the settings come from (Case C7) ---------------------------------------------------------------------------


def test_without_processor_files_the_model_config_decides(tmp_path: Path) -> None:
    """Case C7."""
    clip, siglip = load_single_tile(tmp_path, CLIP_336), load_single_tile(tmp_path, SIGLIP_384)
    assert (clip.shortest_edge, clip.crop_to) == (336, (336, 336))
    assert (siglip.shortest_edge, siglip.resize_to, siglip.crop_to) == (None, (384, 384), None)
    reference = transformers.SiglipImageProcessorPil(size={"height": 384, "width": 384})
    assert_equal_to_reference(reference, siglip, [(640, 480)])


def test_a_nested_processor_config_wins_over_the_older_file(tmp_path: Path) -> None:
    processor_folder(tmp_path, image_processor_type="CLIPImageProcessor", crop_size=224, size=224)
    nested = {"image_processor_type": "CLIPImageProcessorFast", "crop_size": 336, "size": {"shortest_edge": 336}}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": nested}))
    assert load_single_tile(tmp_path, CLIP_336).size == (336, 336)


def test_equal_processing_from_different_files_gives_equal_text(tmp_path: Path) -> None:
    derived = load_single_tile(tmp_path, CLIP_336)
    transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}
    ).save_pretrained(tmp_path)
    loaded = load_single_tile(tmp_path, CLIP_336)
    assert derived == loaded
    assert from_json(to_json(loaded)) == loaded


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"image_processor_type": "Qwen2VLImageProcessor"}, "Qwen2VLImageProcessor"),
        ({"do_center_crop": False}, "do_center_crop=False"),
        ({"do_resize": False}, "do_resize=False"),
        ({"size": {"shortest_edge": 3, "longest_edge": 9}}, "longest_edge"),
        ({"resample": 0}, "resample 0"),
    ],
)
def test_a_processor_that_is_not_implemented_stops_the_start(
    tmp_path: Path, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=reason):
        load_single_tile(processor_folder(tmp_path, **fields), CLIP_336)
