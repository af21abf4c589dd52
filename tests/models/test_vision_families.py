"""All families but LLaVA's against transformers: pixels, how a picture stands in the prompt for every size, rows, and
whole answers.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas
from transformers.models.idefics3.image_processing_pil_idefics3 import get_resize_output_image_size
from transformers.models.pixtral import image_processing_pil_pixtral
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from services.text_engine.core.scheduler import GROWTH_BLOCKS
from services.text_engine.models.config import ConfigError
from services.text_engine.models.load_config import load_model_config
from services.vision_encoder.errors import UnsupportedCheckpoint
from services.vision_encoder.families.features import normalize
from services.vision_encoder.families.qwen2_5_vl import window_order
from services.vision_encoder.families.registry import load_family
from services.vision_encoder.preprocessing.native_resolution import WithinBox, WithinBudget
from services.vision_encoder.preprocessing.split_tiles import SplitTiles
from services.vision_encoder.preprocessing.stretched_tiles import StretchedTiles
from shared.wire.images import ImageMetadata
from tests.conftest import CheckpointFactory
from tests.models.split_system import Oracle, SplitSystem, all_features, load_processor, picture
from tests.models.test_engine import bytes_per_block
from tests.models.test_towers import copied
from tests.vision_checkpoints import VISION_RECIPES

EXTREMES = [
    (1, 1),
    (1, 499),
    (499, 1),
    (500, 19),
    (19, 500),
    (2000, 3),
    (3, 2000),
    (8192, 64),
    (64, 8192),
    (4096, 4096),
]
SIZES = [
    *EXTREMES[:6],
    (31, 31),
    (55, 56),
    (57, 56),
    (112, 112),
    (113, 55),
    (97, 211),
    (211, 97),
    (333, 333),
    (640, 480),
]
NORMAL = {"rescale_factor": 1 / 255, "mean": (0.5,) * 3, "std": (0.5,) * 3}


@dataclass(frozen=True)
class Pair:
    """One checkpoint through ours and through transformers."""

    name: str
    ours: SplitSystem
    oracle: Oracle


@pytest.fixture(scope="module", params=VISION_RECIPES)
def pair(request: pytest.FixtureRequest, checkpoint: CheckpointFactory) -> Pair:
    folder = checkpoint(request.param)
    return Pair(request.param, SplitSystem(folder), Oracle(folder))


def process(processor: Any, image: Image.Image) -> Any:
    mark = processor.tokenizer.convert_ids_to_tokens(processor.image_token_id)
    return processor(text=mark, images=[image], return_tensors="pt")


# --- pixels and rows --------------------------------------------------------------------------------------------------


def test_pixels_and_rows_are_the_references(pair: Pair):
    processor = pair.oracle.processor
    refused = [size for size in SIZES if reference_text(processor)(*size) is None]
    for size in set(SIZES) - set(refused):
        image = picture(*size)
        inputs = process(processor, image)
        prepared = pair.ours.prepared(image)
        pixels = normalize(prepared.pixels, pair.ours.preprocessing)
        expected = inputs["pixel_values"]
        if pair.name.startswith("qwen"):  # it takes flat patches; ours become patches in the tower
            pixels = torch.from_numpy(processor.image_processor.patchify(pixels[0].numpy(), 8, 2, 2)[0])
        torch.testing.assert_close(pixels, expected.view_as(pixels), rtol=0, atol=1e-6, msg=str(size))
        rows = pair.ours.encode(image)
        if len(rows) == 1:  # the reference for Mistral 3 squeezes it away
            continue
        reference = features(pair.oracle, inputs)
        assert rows.shape == reference.shape, size
        torch.testing.assert_close(rows, reference, rtol=1e-4, atol=1e-5 * float(reference.abs().max()) * 2)


@torch.inference_mode()
def features(oracle: Oracle, inputs: Any) -> torch.Tensor:
    names = ("pixel_values", "image_sizes", "image_grid_thw", "pixel_attention_mask")
    given = {name: inputs[name] for name in names if name in inputs}
    return all_features(oracle.model.model.get_image_features(**given))


@pytest.mark.parametrize("name", ["internvl", "internvl_last_norm"])
@pytest.mark.parametrize("layer", [-2, 1])
def test_rows_of_an_inner_layer_of_internvl_are_the_references(
    checkpoint: CheckpointFactory, tmp_path: Path, name: str, layer: int
):
    """Where there is a norm behind the last layer, it is of no other."""
    folder = copied(checkpoint(name), tmp_path / "inner", vision_feature_layer=layer)
    image, oracle = picture(97, 211), Oracle(folder)
    reference = features(oracle, process(oracle.processor, image))
    torch.testing.assert_close(SplitSystem(folder).encode(image), reference, rtol=1e-4, atol=1e-4)


def test_pictures_in_a_batch_get_the_rows_that_each_gets_alone(pair: Pair):
    images = [picture(90, 61, seed) for seed in range(3)]
    together = pair.ours.family.encode([pair.ours.prepared(image) for image in images])
    for image, rows in zip(images, together, strict=True):
        torch.testing.assert_close(rows, pair.ours.encode(image), rtol=1e-4, atol=1e-4)


# --- how many rows, and what stands around them (Case C4) -------------------------------------------------------------

SMALL, LARGE = range(1, 65), range(70, 2000, 137)
EVERY_SIZE = [*EXTREMES, *itertools.product(SMALL, SMALL), *itertools.product((1, 17, *LARGE), repeat=2)]
Text = Callable[[int, int], str | None]


def laid_out(metadata: ImageMetadata, image_token: str) -> str:
    return "".join(piece if isinstance(piece, str) else image_token * piece for piece in metadata.pieces)


class Shapes(transformers.Idefics3ImageProcessorPil):
    """The reference's arithmetic of sizes on pictures without content."""

    def resize(self, image: Any, size: Any, **_options: Any) -> Any:
        height, width = size.height, size.width
        if size.longest_edge:
            height, width = get_resize_output_image_size(image, size.longest_edge)
        return blank(width, height)


def blank(width: int, height: int) -> Any:
    return np.broadcast_to(np.uint8(0), (3, height, width))


def reference_text(processor: Any) -> Text:
    """(width, height) -> what the processor writes for a picture of that size; None where it refuses it."""
    name = type(processor).__name__
    image_processor = processor.image_processor
    shapes = Shapes()

    def idefics3(width: int, height: int) -> str | None:
        rows = columns = 0
        if image_processor.do_image_splitting:
            image = shapes.resize(blank(width, height), image_processor.size)
            image = shapes.resize_for_vision_encoder(image, image_processor.max_image_size["longest_edge"])
            _, rows, columns = shapes.split_images(image, image_processor.max_image_size)
        text: str = processor.replace_image_token({"rows": [[rows]], "cols": [[columns]]}, 0)
        return text

    def pixtral(width: int, height: int) -> str | None:
        patch = processor.patch_size * processor.spatial_merge_size
        side = image_processor.size["longest_edge"]
        size = image_processing_pil_pixtral.get_resize_output_image_size(
            blank(width, height), (side, side), (patch, patch), "channels_first"
        )
        if not all(size):
            return None
        text: str = processor.replace_image_token({"image_sizes": [size]}, 0)
        return text

    def qwen_vl(width: int, height: int) -> str | None:
        if max(width, height) > 200 * min(width, height):
            return None
        size = image_processor.size
        high, wide = smart_resize(height, width, 16, size["shortest_edge"], size["longest_edge"])
        grid = np.array([[1, high // 8, wide // 8]])
        text: str = processor.replace_image_token({"image_grid_thw": grid}, 0)
        return text

    def internvl(width: int, height: int) -> str | None:
        num_tiles = image_processor.get_number_of_image_patches(height, width, {"crop_to_patches": True})
        text: str = processor.replace_image_token({"num_patches": [num_tiles]}, 0)
        return text

    def gemma3(_width: int, _height: int) -> str | None:
        text: str = processor.full_image_sequence
        return text

    return {
        "Idefics3Processor": idefics3,
        "InternVLProcessor": internvl,
        "PixtralProcessor": pixtral,
        "Qwen2VLProcessor": qwen_vl,
        "Qwen2_5_VLProcessor": qwen_vl,
        "Qwen3VLProcessor": qwen_vl,
        "Gemma3Processor": gemma3,
    }[name]


def image_token_of(processor: Any) -> str:
    token: str = getattr(processor.tokenizer, "image_token", None) or processor.image_token
    return token


@pytest.mark.parametrize("name", VISION_RECIPES)
def test_a_picture_of_every_size_stands_in_the_prompt_as_with_the_reference(checkpoint: CheckpointFactory, name: str):
    folder = checkpoint(name)
    family, processor = load_family(folder), load_processor(folder)
    image_token, expected = image_token_of(processor), reference_text(processor)
    for width, height in EVERY_SIZE:
        metadata = family.describe(width, height)
        text = expected(width, height)
        if text is not None:
            assert laid_out(metadata, image_token) == text, (width, height)


@pytest.mark.parametrize("name", ["smolvlm", "internvl", "pixtral", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_announced_rows_are_encoded_rows_for_any_size(checkpoint: CheckpointFactory, name: str):
    family = load_family(checkpoint(name))
    family.prepare_weights(torch.device("cpu"), torch.float32)
    system = SplitSystem(checkpoint(name))

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(1, 700), st.integers(1, 700))
    def holds(width: int, height: int) -> None:
        rows = system.encode(Image.new("RGB", (width, height), (width % 256, height % 256, 90)))
        assert rows.shape == (family.describe(width, height).num_tokens, family.num_row_parts * family.hidden_size)

    holds()
    for size in EXTREMES[:8]:
        assert len(system.encode(Image.new("RGB", size))) == family.describe(*size).num_tokens


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([(1456, 364), (2048, 512), (1536, 384), (8192, 512)])
)
def test_tiles_at_published_sizes_are_the_references(width: int, height: int, setting: tuple[int, int]):
    longest_edge, tile = setting
    ours = SplitTiles(longest_edge=longest_edge, tile_size=tile, splits=True, resample=1, **NORMAL)
    shapes = Shapes(size={"longest_edge": longest_edge}, max_image_size={"longest_edge": tile})
    image = shapes.resize(blank(width, height), shapes.size)
    try:
        image = shapes.resize_for_vision_encoder(image, tile)
    except ValueError:  # a sliver rounded to nothing
        return
    assert ours.grid(width, height) == shapes.split_images(image, shapes.max_image_size)[1:]


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([(1, 12), (1, 6), (2, 40), (5, 5), (3, 1)]))
def test_stretched_tiles_at_published_sizes_are_the_references(width: int, height: int, limits: tuple[int, int]):
    ours = StretchedTiles(tile_size=448, min_tiles=limits[0], max_tiles=limits[1], resample=3, **NORMAL)
    columns, rows = get_optimal_tiled_canvas((height, width), (448, 448), *limits)
    assert ours.grid(width, height) == (rows, columns)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 5000))
def test_grids_at_published_sizes_are_the_references(width: int, height: int):
    for side, patch in ((1024, 16), (1540, 28)):
        ours = WithinBox(box=(side, side), patch_size=patch, resample=3, **NORMAL).grid(width, height)
        high, wide = image_processing_pil_pixtral.get_resize_output_image_size(
            blank(width, height), (side, side), (patch, patch), "channels_first"
        )
        assert not high or not wide or ours == (high // patch, wide // patch)
    if max(width, height) <= 200 * min(width, height):
        budget = WithinBudget(min_pixels=3136, max_pixels=12_845_056, patch_size=28, resample=3, **NORMAL)
        high, wide = smart_resize(height, width, 28, 3136, 12_845_056)
        assert budget.grid(width, height) == (high // 28, wide // 28)


@pytest.mark.parametrize(("lines", "columns"), [(1, 1), (1, 9), (4, 4), (5, 7), (8, 3), (9, 9)])
def test_every_cell_stands_in_exactly_one_window_next_to_its_neighbours(lines: int, columns: int):
    order, groups = window_order(lines, columns, window_size=4, cell_size=1)
    assert sorted(order.tolist()) == list(range(lines * columns))
    sizes = [length for count, length in groups for _ in range(count)]
    for window in order.split(sizes):
        assert len({(cell // columns // 4, cell % columns // 4) for cell in window.tolist()}) == 1


# --- whole answers ----------------------------------------------------------------------------------------------------


def question(*sizes: tuple[int, int]) -> list[str | Image.Image]:
    parts: list[str | Image.Image] = ["Look: "]
    for seed, size in enumerate(sizes):
        parts += [picture(*size, seed), f" number {seed}, what? "]
    return parts


QUESTIONS = [
    question((60, 44)),
    question((17, 150)),
    question((1, 1), (200, 30)),
    question((112, 112), (44, 60), (7, 9)),
]


@pytest.mark.parametrize("layout", ["published", "transformers", "nested"])
@pytest.mark.parametrize("name", VISION_RECIPES)
def test_answers_are_those_of_transformers(checkpoint: CheckpointFactory, name: str, layout: str):
    folder = checkpoint(name, layout=layout)
    oracle, system = Oracle(folder), SplitSystem(folder, attention_backend="cpu" if layout == "nested" else "reference")
    for parts in QUESTIONS if layout == "published" else QUESTIONS[2:3]:
        assert system.prompt(parts).token_ids == oracle.inputs(parts)["input_ids"][0].tolist()
        assert system.answer(parts).token_ids == oracle.answer(parts)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_batch_of_all_questions_gives_the_answers_of_each(pair: Pair, backend: str):
    system = SplitSystem(pair.ours.folder, attention_backend=backend)
    for i, parts in enumerate(QUESTIONS):
        system.add(f"r{i}", parts)
    answers = system.driver.run()
    for i, parts in enumerate(QUESTIONS):
        assert answers[f"r{i}"].token_ids == pair.ours.answer(parts).token_ids


@pytest.mark.parametrize("budget", [23, 37, 64])
def test_chunks_and_the_prefix_cache_change_no_answer(pair: Pair, budget: int):
    """The bidirectional images of Gemma 3 have 16 rows; the other families' may be cut anywhere."""
    parts = question((44, 60), (130, 90))
    expected = pair.ours.answer(parts).token_ids
    chunked = SplitSystem(pair.ours.folder, max_num_batched_tokens=budget, max_num_seqs=4)
    assert chunked.answer(parts).token_ids == expected
    again = chunked.answer(parts)
    assert again.token_ids == expected
    assert again.finished is not None
    assert again.finished.num_cached_tokens >= 16
    other_end = [*parts, "And then?"]
    assert chunked.answer(other_end).token_ids == pair.ours.answer(other_end).token_ids


def test_preemption_changes_no_answer(pair: Pair):
    parts = [question((44, 60), (130, 90)), question((50, 20)), question((33, 99))]
    calm = SplitSystem(pair.ours.folder)
    # Room for all of them to start, and not for all of them to end.
    num_blocks = sum(len(calm.prompt(part).token_ids) // 16 + 1 + GROWTH_BLOCKS for part in parts)
    tight = SplitSystem(pair.ours.folder, kv_cache_memory=f"{num_blocks * bytes_per_block(calm.driver)}")
    for system in (calm, tight):
        for i, part in enumerate(parts):
            system.add(f"r{i}", part, max_tokens=100)
        system.driver.run()
    assert tight.driver.engine.scheduler.num_preemptions > 0
    for i in range(len(parts)):
        assert tight.driver.answers[f"r{i}"].token_ids == calm.driver.answers[f"r{i}"].token_ids


def test_a_picture_after_a_long_text_and_before_one_keeps_its_place(pair: Pair):
    """Offsets of positions, spans and windows that a short prompt would hide."""
    parts = [
        "The cat looks at the picture. " * 5,
        picture(90, 40),
        "Describe the colours. " * 4,
        picture(33, 70, 5),
        "?",
    ]
    assert pair.ours.answer(parts).token_ids == pair.oracle.answer(parts)


def test_pictures_and_text_may_come_in_any_order(pair: Pair):
    """Cases C9 and C12."""
    first, second = picture(31, 60), picture(88, 20, 3)
    for parts in ([first], [first, "What?"], ["What?", first], [first, second, "And?"]):
        assert pair.ours.prompt(parts).token_ids == pair.oracle.inputs(parts)["input_ids"][0].tolist()
        assert pair.ours.answer(parts).token_ids == pair.oracle.answer(parts)


def test_what_a_user_types_is_never_a_picture(pair: Pair):
    """Case C1: every special token's spelling, beside a real picture."""
    typed = " ".join(pair.ours.driver.engine.tokenizer.special_strings)
    special = set(pair.oracle.processor.tokenizer.all_special_ids)
    plain, marked = pair.ours.prompt([picture(31, 60), "x"]), pair.ours.prompt([picture(31, 60), f"x {typed}"])
    for prompt in (plain, marked):
        assert [token for token in prompt.token_ids if token in special] == [
            token for token in plain.token_ids if token in special
        ]
    assert marked.images == plain.images


def test_text_alone_is_answered_as_by_transformers(pair: Pair):
    assert pair.ours.answer(["What is shown?"]).token_ids == pair.oracle.answer(["What is shown?"])


def test_rows_of_an_image_of_gemma_see_each_other(checkpoint: CheckpointFactory):
    """Without the spans the answer would be another: the test above would not be fooled by causal rows."""
    parts = question((60, 44))
    folder = checkpoint("gemma3_untied")
    system = SplitSystem(folder)
    prompt = system.prompt(parts)
    causal = [type(span)(span.image_key, span.start, span.num_tokens) for span in prompt.images]
    system.driver.add("causal", prompt.token_ids, images=causal, image_refs=prompt.image_refs, max_tokens=16)
    assert system.driver.run()["causal"].token_ids != SplitSystem(folder).answer(parts).token_ids


# --- fingerprints (Cases E5, E7) --------------------------------------------------------------------------------------


def fingerprint_of(folder: Path) -> str:
    return load_family(folder).fingerprint(torch.float32, (255, 255, 255))


@pytest.mark.parametrize("name", ["smolvlm", "internvl", "mistral3", "gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_the_same_model_saved_anew_keeps_its_fingerprint(checkpoint: CheckpointFactory, name: str):
    layouts = ("published", "transformers", "nested")
    assert len({fingerprint_of(checkpoint(name, layout=layout)) for layout in layouts}) == 1


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("smolvlm", {"hidden_act": "gelu"}),
        ("smolvlm", {"num_attention_heads": 6}),
        ("mistral3", {"rope_theta": 500.0}),
        ("mistral3", {"hidden_act": "gelu"}),
        ("gemma3", {"layer_norm_eps": 1e-3}),
        ("internvl", {"hidden_act": "quick_gelu"}),
        ("internvl", {"layer_norm_eps": 1e-3}),
        ("qwen2_vl", {"hidden_act": "gelu"}),
        ("qwen2_vl", {"num_heads": 6}),
        ("qwen2_5_vl", {"fullatt_block_indexes": [0, 3]}),
        ("qwen2_5_vl", {"window_size": 64}),
        ("qwen3_vl", {"hidden_act": "gelu"}),
        ("qwen3_vl", {"deepstack_visual_indexes": [1, 2]}),
    ],
)
def test_whatever_changes_rows_changes_the_fingerprint(
    checkpoint: CheckpointFactory, tmp_path: Path, name: str, changes: dict[str, Any]
):
    folder = checkpoint(name)
    vision = json.loads((folder / "config.json").read_text())["vision_config"]
    other = copied(folder, tmp_path / "other", vision_config=vision | changes)
    image = picture(150, 90)
    assert not torch.equal(SplitSystem(other).encode(image), SplitSystem(folder).encode(image))
    assert fingerprint_of(other) != fingerprint_of(folder)


# --- what stops the start ---------------------------------------------------------------------------------------------


def test_gemma_whose_window_is_shorter_than_an_image_is_refused(checkpoint: CheckpointFactory, tmp_path: Path):
    folder = copied(checkpoint("gemma3"), tmp_path / "long", mm_tokens_per_image=25)
    with pytest.raises(ConfigError, match=r"mm_tokens_per_image is 25; .* sliding_window"):
        load_model_config(folder)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("pixtral", {"vision_feature_select_strategy": "default"}, "'full'"),
        ("smolvlm", {"scale_factor": 3}, "scale_factor is 3"),
        ("gemma3", {"mm_tokens_per_image": 9}, "mm_tokens_per_image is 9"),
        ("internvl", {"vision_feature_select_strategy": "full"}, "'default'"),
        ("internvl", {"vision_feature_layer": [-1, -2]}, "one layer"),
        ("internvl", {"downsample_ratio": 0.4}, "downsample_ratio is 0.4"),
        ("internvl", {"vision_config": {"norm_type": "batch_norm"}}, "norm_type"),
        ("internvl", {"vision_config": {"use_absolute_position_embeddings": False}}, "must be true"),
        ("internvl", {"vision_config": {"image_size": 448}}, "56 x 56 pixels, the vision tower takes 448 x 448"),
        ("mistral3", {"vision_feature_layer": [-1, -2]}, "one layer"),
        ("qwen3_vl", {"vision_config": {"deepstack_visual_indexes": [2, 0]}}, "rising numbers below depth = 27"),
        ("qwen3_vl", {"vision_config": {"num_position_embeddings": 37}}, "a square is needed"),
    ],
)
def test_a_checkpoint_that_is_not_implemented_stops_the_start(
    checkpoint: CheckpointFactory, tmp_path: Path, name: str, change: dict[str, Any], reason: str
):
    with pytest.raises(UnsupportedCheckpoint, match=reason):
        load_family(copied(checkpoint(name), tmp_path / "changed", **change))
