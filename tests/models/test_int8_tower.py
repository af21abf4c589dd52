"""The tower in int8: near the exact one in every family, the same in any batch, under keys of its own."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from services.vision_encoder.config import Quantization, VisionEncoderSettings
from services.vision_encoder.families.interface import Family, PreparedImage
from services.vision_encoder.families.registry import load_family
from services.vision_encoder.int8_linear import Int8Linear
from services.vision_encoder.loading import full_fingerprint, prepare_family
from shared.settings import SettingsError, load_settings
from tests.conftest import CheckpointFactory
from tests.models.split_system import picture

CPU = torch.device("cpu")
# One per tower and way of using it: CLIP, SigLIP, tiles, all connectors, both of InternVL's towers, Pixtral with and
# without merging, and Qwen's three.
NAMES = [
    "llava_clip_llama",
    "vip_llava",
    "llava_next_siglip",
    "gemma3",
    "smolvlm",
    "internvl",
    "internvl_6b_tower",
    "pixtral",
    "mistral3",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
]
MAX_ERROR = 0.1  # the tiny towers are narrow and random, which is hard on rounding: bf16 costs up to 0.045 in them


def loaded(folder: Path, quantization: Quantization, dtype: torch.dtype = torch.float32) -> Family:
    family = load_family(folder)
    prepare_family(family, quantization, CPU, dtype)
    return family


def prepared(family: Family, width: int, height: int, seed: int = 0) -> PreparedImage:
    image = picture(width, height, seed)
    return PreparedImage(torch.from_numpy(family.preprocessing.apply(image)), width, height)


def error_of(rows: torch.Tensor, expected: torch.Tensor) -> float:
    """Length of the difference, over length."""
    return float((rows.float() - expected).norm() / expected.norm())


# --- one layer --------------------------------------------------------------------------------------------------------


@st.composite
def layers(draw: st.DrawFn) -> tuple[nn.Linear, torch.Tensor]:
    """A layer, and inputs [batch, rows, in_features] of very different sizes per row."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    in_features, out_features = draw(st.integers(1, 130)), draw(st.integers(1, 70))
    linear = nn.Linear(in_features, out_features, bias=draw(st.booleans())).requires_grad_(False)
    x = torch.randn(draw(st.integers(1, 3)), draw(st.integers(1, 40)), in_features)
    return linear, x * 10.0 ** torch.randint(-6, 6, (*x.shape[:-1], 1))


@given(layers())
def test_every_value_is_off_by_no_more_than_rounding_explains(case: tuple[nn.Linear, torch.Tensor]):
    """Both factors of a product are off by half a step at most, so a sum is off by at most what is added up here."""
    linear, x = case
    step = x.abs().amax(-1, keepdim=True) / 127
    weight_step = linear.weight.abs().amax(1) / 127
    bound = (
        step / 2 * linear.weight.abs().sum(1)
        + weight_step / 2 * x.abs().sum(-1, keepdim=True)
        + step * weight_step / 4 * x.shape[-1]
    )
    error = (Int8Linear(linear, has_vnni=True)(x) - linear(x)).abs()
    assert bool((error <= bound * 1.001 + 1e-5 * linear(x).abs() + 1e-12).all())


@given(layers())
def test_a_cpu_without_the_instruction_gets_the_same_numbers(case: tuple[nn.Linear, torch.Tensor]):
    linear, x = case
    ours, theirs = (Int8Linear(linear, has_vnni=has_vnni)(x) for has_vnni in (True, False))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


@given(layers(), st.integers(0, 39))
def test_a_row_alone_is_bit_for_bit_what_it_is_among_others(case: tuple[nn.Linear, torch.Tensor], which: int):
    linear, x = case
    layer, row = Int8Linear(linear, has_vnni=True), which % x.shape[1]
    assert torch.equal(layer(x[:1, row : row + 1]), layer(x)[:1, row : row + 1])


def test_rows_and_weights_of_zeros_give_the_bias():
    linear = nn.Linear(5, 3).requires_grad_(False)
    assert torch.equal(Int8Linear(linear, has_vnni=True)(torch.zeros(2, 5)), linear.bias.expand(2, 3))
    linear.weight.zero_()
    assert torch.equal(Int8Linear(linear, has_vnni=True)(torch.ones(2, 5)), linear.bias.expand(2, 3))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so_and_spoils_no_other_row(value: float):
    """Case D26: the encoder refuses an embedding that is not finite; it must get to see that."""
    linear = nn.Linear(5, 3).requires_grad_(False)
    layer = Int8Linear(linear, has_vnni=True)
    x = torch.ones(2, 5)
    x[0, 2] = value
    out = layer(x)
    assert not bool(out[0].isfinite().any())
    assert torch.equal(out[1], layer(torch.ones(1, 5))[0])


# --- whole towers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_every_family_s_rows_are_near_the_exact_ones_and_all_its_layers_are_in_int8(
    checkpoint: CheckpointFactory, name: str
):
    folder = checkpoint(name)
    exact, int8, bfloat16 = loaded(folder, "none"), loaded(folder, "int8"), loaded(folder, "none", torch.bfloat16)
    for size in [(60, 44), (97, 211), (113, 55)]:
        [expected], [rows], [rounded] = (family.encode([prepared(family, *size)]) for family in (exact, int8, bfloat16))
        assert rows.dtype == expected.dtype
        assert 0 < error_of(rows, expected) < min(MAX_ERROR, 4 * error_of(rounded, expected))
    modules = list(int8.tower.get_submodule("layers").modules())
    num_linears = sum(isinstance(module, nn.Linear) for module in load_family(folder).tower.modules())
    assert sum(isinstance(module, Int8Linear) for module in modules) == num_linears - 1  # but the patch embedding


@torch.inference_mode()
def test_a_bfloat16_tower_in_int8_gives_bfloat16_rows_near_the_exact_ones(checkpoint: CheckpointFactory):
    folder = checkpoint("llava_clip_llama")
    int8, exact = loaded(folder, "int8", torch.bfloat16), loaded(folder, "none")
    [rows], [expected] = (family.encode([prepared(family, 60, 44)]) for family in (int8, exact))
    assert rows.dtype == torch.bfloat16
    assert error_of(rows, expected) < MAX_ERROR


@torch.inference_mode()
def test_a_picture_in_a_batch_has_the_rows_it_has_alone(checkpoint: CheckpointFactory):
    family = loaded(checkpoint("llava_clip_llama"), "int8")
    images = [prepared(family, 60, 44, seed) for seed in range(5)]
    for image, rows in zip(images, family.encode(images), strict=True):
        assert error_of(rows, family.encode([image])[0]) < 1e-2  # a last bit of attention may round otherwise


# --- keys and refusals ------------------------------------------------------------------------------------------------


def test_no_two_choices_of_tower_and_storage_share_a_key(checkpoint: CheckpointFactory):
    folder = checkpoint("llava_clip_llama")
    family = load_family(folder)
    fingerprints = {
        full_fingerprint(
            family,
            torch.float32,
            VisionEncoderSettings(model=folder, quantization=quantization, embedding_storage=storage, redis_url=None),
        )
        for quantization, storage in itertools.product(("none", "int8"), ("exact", "int8"))
    }
    assert len(fingerprints) == 4
    assert family.fingerprint(torch.float32, (255, 255, 255)) in fingerprints


def test_an_unknown_quantization_stops_the_start_and_names_the_right_ones(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DIPTYCH_ENCODER_QUANTIZATION", "int4")
    with pytest.raises(SettingsError, match=r"DIPTYCH_ENCODER_QUANTIZATION=int4 is not one of none, int8"):
        load_settings(VisionEncoderSettings, model=Path("any"))


def test_int8_on_a_gpu_is_refused_before_anything_is_moved_there(checkpoint: CheckpointFactory):
    family = load_family(checkpoint("llava_clip_llama"))
    with pytest.raises(ValueError, match="quantization=int8 is for CPUs"):
        prepare_family(family, "int8", torch.device("cuda"), torch.float16)
