"""Tower and projector against transformers on tiny random checkpoints, and the fingerprint of what they give."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from services.vision_encoder.errors import UnsupportedCheckpoint
from services.vision_encoder.families.features import normalize, resolve_feature_layers
from services.vision_encoder.families.interface import PreparedImage
from services.vision_encoder.families.registry import load_family
from services.vision_encoder.families.tiled import Tiled
from services.vision_encoder.towers import TowerConfig
from services.vision_encoder.weights import WeightReader, load_tower
from shared.torch_io import Checkpoint
from tests.conftest import CheckpointFactory

FP32 = torch.float32
CPU = torch.device("cpu")
WHITE = (255, 255, 255)
LLAVA_CHECKPOINTS = [
    "llava_clip_llama",
    "llava_clip_full",
    "llava_clip_several_layers",
    "llava_siglip_qwen2",
    "llava_siglip_qwen3",
    "llava_clip_mistral",
]


def loaded(folder: Path, dtype: torch.dtype = FP32) -> Tiled:
    family = load_family(folder)
    assert isinstance(family, Tiled)
    family.prepare_weights(CPU, dtype)
    return family


def pictures(family: Tiled, count: int) -> list[PreparedImage]:
    generator = torch.Generator().manual_seed(3)
    shape = (1, 3, *family.preprocessing.size)
    tiles = [torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) for _ in range(count)]
    return [PreparedImage(tile, 17, 900) for tile in tiles]


@torch.inference_mode()
def reference(folder: Path, family: Tiled, images: list[PreparedImage]) -> list[torch.Tensor]:
    model = transformers.LlavaForConditionalGeneration.from_pretrained(folder, dtype=FP32).eval()
    pixels = normalize(torch.cat([image.pixels for image in images]), family.preprocessing)
    features: list[torch.Tensor] = model.get_image_features(pixel_values=pixels).pooler_output
    return features


def copied(folder: Path, target: Path, **config: Any) -> Path:
    """The checkpoint with some fields of config.json changed; None removes one."""
    shutil.copytree(folder, target)
    file = target / "config.json"
    fields = json.loads(file.read_text()) | config
    file.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
    return target


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", LLAVA_CHECKPOINTS)
def test_embeddings_equal_the_reference(checkpoint: CheckpointFactory, name: str) -> None:
    folder = checkpoint(name)
    family = loaded(folder)
    images = pictures(family, 3)
    for result, expected in zip(family.encode(images), reference(folder, family, images), strict=True):
        assert result.shape == expected.shape == (family.describe(17, 900).num_tokens, family.hidden_size)
        assert relative_error(result, expected) < 1e-5


@pytest.mark.parametrize("layout", ["published", "transformers", "nested"])
def test_every_spelling_of_the_names_gives_one_fingerprint(checkpoint: CheckpointFactory, layout: str) -> None:
    plain = loaded(checkpoint("llava_clip_llama"))
    other = loaded(checkpoint("llava_clip_llama", layout=layout, max_shard_size="100KB"))
    assert other.fingerprint(FP32, WHITE) == plain.fingerprint(FP32, WHITE)
    images = pictures(plain, 1)
    assert torch.equal(other.encode(images)[0], plain.encode(images)[0])


def test_bf16_stays_close_to_fp32(checkpoint: CheckpointFactory) -> None:
    folder = checkpoint("llava_clip_llama")
    images = pictures(loaded(folder), 2)
    exact, rough = loaded(folder).encode(images), loaded(folder, torch.bfloat16).encode(images)
    for expected, result in zip(exact, rough, strict=True):
        assert result.dtype is torch.bfloat16
        assert torch.nn.functional.cosine_similarity(result.float(), expected, dim=-1).min() > 0.99


def test_an_image_in_a_batch_equals_the_image_alone(checkpoint: CheckpointFactory) -> None:
    family = loaded(checkpoint("llava_clip_llama"))
    images = pictures(family, 5)
    for alone, together in zip((family.encode([image])[0] for image in images), family.encode(images), strict=True):
        assert relative_error(together, alone) < 1e-5


@pytest.mark.parametrize("layer", [0, 1, 3, -1, -3, -4, [0, 2], [-1, 1, -1]])
def test_any_feature_layer_equals_the_reference_and_deeper_ones_are_not_loaded(
    checkpoint: CheckpointFactory, tmp_path: Path, layer: Any
) -> None:
    """The projector does not fit several layers here, so the tower's own output is compared."""
    folder = copied(checkpoint("llava_clip_llama"), tmp_path / "model")
    tower_config = TowerConfig.from_hf(json.loads((folder / "config.json").read_text())["vision_config"])
    layers = resolve_feature_layers(layer, tower_config.num_layers)
    tower = load_tower(WeightReader(Checkpoint(folder)), tower_config, layers).eval()
    assert len(tower.layers) == max(layers)
    pixels = torch.randn(2, 3, 56, 56, generator=torch.Generator().manual_seed(1))
    model = transformers.LlavaForConditionalGeneration.from_pretrained(folder, dtype=FP32).eval()
    with torch.inference_mode():
        states = model.model.vision_tower(pixels, output_hidden_states=True).hidden_states
        for result, index in zip(tower(pixels), layer if isinstance(layer, list) else [layer], strict=True):
            assert relative_error(result, states[index]) < 1e-5


def test_an_image_size_that_is_no_multiple_of_the_patch_leaves_the_rest_out(tmp_path: Path) -> None:
    """As siglip-so400m-patch14-384 does: 384 = 27 x 14 + 6."""
    fields = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.SiglipVisionConfig(**fields, image_size=48, patch_size=14, vision_use_head=False)
    model = transformers.SiglipVisionModel(config).eval()
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("vision_model."): tensor for name, tensor in load_file(file).items()}
    save_file({f"vision_tower.{name}": tensor for name, tensor in tensors.items()}, file)
    tower_config = TowerConfig.from_hf(config.to_dict())
    assert tower_config.num_positions == 9
    tower = load_tower(WeightReader(Checkpoint(tmp_path)), tower_config, (2,)).eval()
    pixels = torch.randn(1, 3, 48, 48)
    with torch.inference_mode():
        expected = model(pixels, output_hidden_states=True).hidden_states[2]
        assert relative_error(tower(pixels)[0], expected) < 1e-5


# --- counts (Case C6) and defaults (Case C7) --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "strategy", "count"),
    [
        ("llava_clip_llama", "default", 16),
        ("llava_clip_llama", "full", 17),
        ("llava_siglip_qwen2", "full", 16),
        ("llava_siglip_qwen2", "default", 15),
    ],
)
def test_the_number_of_tokens_follows_tower_and_strategy(
    checkpoint: CheckpointFactory, tmp_path: Path, name: str, strategy: str, count: int
) -> None:
    """Case C6; an unknown strategy stops the start, see below."""
    folder = copied(checkpoint(name), tmp_path / "model", vision_feature_select_strategy=strategy)
    family = loaded(folder)
    images = pictures(family, 1)
    assert family.describe(640, 480).num_tokens == count
    assert [len(rows) for rows in family.encode(images)] == [count]
    assert [len(rows) for rows in reference(folder, family, images)] == [count]


def test_absent_config_fields_and_processor_files_change_nothing(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    """Case C7."""
    folder = checkpoint("llava_clip_llama")
    bare = copied(
        folder,
        tmp_path / "model",
        vision_feature_layer=None,
        vision_feature_select_strategy=None,
        projector_hidden_act=None,
        multimodal_projector_bias=None,
        text_config={"model_type": "llama"},
    )
    for file in ("processor_config.json", "preprocessor_config.json"):
        (bare / file).unlink()
    family, expected = loaded(bare), loaded(folder)
    assert family.fingerprint(FP32, WHITE) == expected.fingerprint(FP32, WHITE)
    images = pictures(expected, 1)
    assert torch.equal(family.encode(images)[0], expected.encode(images)[0])


def test_a_projector_without_bias_equals_the_reference(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    folder = copied(checkpoint("llava_clip_llama"), tmp_path / "model", multimodal_projector_bias=False)
    file = folder / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if not _is_projector_bias(name)}
    save_file(kept, file, metadata={"format": "pt"})
    family = loaded(folder)
    images = pictures(family, 1)
    assert relative_error(family.encode(images)[0], reference(folder, family, images)[0]) < 1e-5


def _is_projector_bias(name: str) -> bool:
    return "multi_modal_projector" in name and name.endswith("bias")


# --- what stops the start ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM is not supported; supported: LlavaFor"),
        ({"architectures": None}, "supported: LlavaForConditionalGeneration"),
        ({"vision_feature_select_strategy": "cls"}, "'cls'"),
        ({"vision_feature_layer": -9}, "-9"),
        ({"vision_feature_layer": [-1, -2]}, "linear_1.weight has shape"),
        ({"vision_feature_layer": []}, "vision_feature_layer"),
        ({"projector_hidden_act": "mish"}, "'mish'"),
        ({"vision_config": {"model_type": "dinov2"}}, "'dinov2'"),
    ],
)
def test_a_checkpoint_that_cannot_be_served_stops_the_start_with_the_reason(
    checkpoint: CheckpointFactory, tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedCheckpoint) as refusal:
        load_family(copied(checkpoint("llava_clip_llama"), tmp_path / "model", **config))
    assert reason in str(refusal.value)


def test_a_processor_whose_pictures_do_not_fit_the_tower_stops_the_start(
    checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    folder = copied(checkpoint("llava_clip_llama"), tmp_path / "model")
    transformers.CLIPImageProcessorPil().save_pretrained(folder)
    with pytest.raises(UnsupportedCheckpoint, match="224 x 224 pixels, the vision tower takes 56 x 56"):
        load_family(folder)


def test_an_empty_folder_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=r"no config\.json"):
        load_family(tmp_path)


# --- the fingerprint (Cases E5, E7) -----------------------------------------------------------------------------------


def _nudge_weights(folder: Path, pattern: str) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    [name] = [name for name in tensors if pattern in name]
    tensors[name].view(-1)[0] += 1e-3
    save_file(tensors, file, metadata={"format": "pt"})


def _set_processor(folder: Path, **fields: Any) -> None:
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def _set_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


RELEVANT: dict[str, Callable[[Path], None]] = {
    "a tower weight": lambda folder: _nudge_weights(folder, "encoder.layers.1.mlp.fc1.weight"),
    "a projector weight": lambda folder: _nudge_weights(folder, "projector.linear_2.bias"),
    "the normalisation": lambda folder: _set_processor(folder, image_mean=[0.5, 0.5, 0.5]),
    "the resampling": lambda folder: _set_processor(folder, resample=2),
    "the strategy": lambda folder: _set_config(folder, vision_feature_select_strategy="full"),
    "the feature layer": lambda folder: _set_config(folder, vision_feature_layer=1),
    "the projector's activation": lambda folder: _set_config(folder, projector_hidden_act="relu"),
}
IRRELEVANT: dict[str, Callable[[Path], None]] = {
    "a weight of an unused layer": lambda folder: _nudge_weights(folder, "encoder.layers.2.mlp.fc1.weight"),
    "a weight of the text model": lambda folder: _nudge_weights(folder, "layers.0.mlp.up_proj.weight"),
    "a note in the processor": lambda folder: _set_processor(folder, processor_class="OtherProcessor"),
    "the same layer counted from the front": lambda folder: _set_config(folder, vision_feature_layer=2),
    "the model's dtype on paper": lambda folder: _set_config(folder, torch_dtype="float16"),
}


@pytest.mark.parametrize("change", [*RELEVANT, *IRRELEVANT])
def test_the_fingerprint_changes_with_what_changes_embeddings_and_with_nothing_else(
    checkpoint: CheckpointFactory, tmp_path: Path, change: str
) -> None:
    """Cases E5, E7."""
    original = checkpoint("llava_clip_llama")
    folder = copied(original, tmp_path / "model")
    (RELEVANT | IRRELEVANT)[change](folder)
    before, after = load_family(original), load_family(folder)
    assert (before.fingerprint(FP32, WHITE) != after.fingerprint(FP32, WHITE)) == (change in RELEVANT)


def test_the_fingerprint_covers_dtype_and_background(checkpoint: CheckpointFactory) -> None:
    """Cases E5, E7."""
    family = load_family(checkpoint("llava_clip_llama"))
    dtypes, backgrounds = (FP32, torch.bfloat16, torch.float16), (WHITE, (0, 0, 0))
    assert len({family.fingerprint(dtype, background) for dtype in dtypes for background in backgrounds}) == 6
