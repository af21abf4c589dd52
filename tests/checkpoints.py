"""Writes tiny random checkpoints in Hugging Face format: what every test compares against transformers with.

One `Recipe` per family or trait; `write_checkpoint` makes the folder. Weights are fp32, equal for equal recipes, and
large enough that greedy output wanders over the vocabulary and its best two logits are well apart.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.llava_checkpoints import LLAVA_FAMILY_RECIPES
from tests.tiny_tokenizer import IMAGE_TOKEN, build_tokenizer
from tests.vision_checkpoints import GEMMA_TEXT, VISION_RECIPES, respell_gemma3_text

Layout = Literal["published", "transformers", "nested"]

WEIGHT_STD: Final = 0.25
NUM_TEXT_TOKENS: Final = 316  # tests.tiny_tokenizer without `<image>`; with it, one more


@dataclass(frozen=True)
class Recipe:
    """What a tiny checkpoint is made of.

    architecture   the text model's class; vision is None for a text-only checkpoint
    text, vision   config fields that differ from the tiny defaults below
    llava          fields of LlavaConfig that differ from its defaults
    spare_rows     vocabulary rows that no token of the tokenizer uses, as padded published checkpoints have
    eos_token_ids  of generation_config.json
    """

    architecture: str
    text: dict[str, Any] = field(default_factory=dict)
    vision_model: Literal["clip", "siglip"] | None = None
    vision: dict[str, Any] = field(default_factory=dict)
    llava: dict[str, Any] = field(default_factory=dict)
    spare_rows: int = 0
    eos_token_ids: int | list[int] = 2


TINY_TEXT: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
TINY_VISION: Final[dict[str, Any]] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 56,  # 4 x 4 patches
    "patch_size": 14,
}
LLAMA3_ROPE: Final[dict[str, Any]] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE: Final[dict[str, Any]] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
LINEAR_ROPE: Final[dict[str, Any]] = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

MOE: Final[dict[str, Any]] = {
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "sliding_window": 32,
}

# Patterns over the names that transformers 5 writes.
PUBLISHED_NAMES: Final = ((r"^vision_tower\.", "vision_tower.vision_model."),)
NESTED_NAMES: Final = (
    (r"^vision_tower\.", "model.vision_tower.vision_model."),
    (r"^multi_modal_projector\.", "model.multi_modal_projector."),
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^language_model\.model\.", "model.language_model."),
)

TEXT_RECIPES: Final[dict[str, Recipe]] = {
    "llama": Recipe("LlamaForCausalLM", {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}),
    "llama_tied": Recipe("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama_biased": Recipe("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama_padded": Recipe("LlamaForCausalLM", {"num_key_value_heads": 4}, spare_rows=68, eos_token_ids=[2, 0]),
    "llama_rope_llama3": Recipe("LlamaForCausalLM", {"rope_parameters": LLAMA3_ROPE}),
    "llama_rope_linear": Recipe("LlamaForCausalLM", {"rope_parameters": LINEAR_ROPE}),
    "llama_rope_yarn": Recipe("LlamaForCausalLM", {"rope_parameters": YARN_ROPE}),
    "qwen2": Recipe("Qwen2ForCausalLM"),
    "qwen2_tied": Recipe("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2_window_unused": Recipe("Qwen2ForCausalLM", {"sliding_window": 32, "use_sliding_window": False}),
    "qwen2_window_upper_layers": Recipe(
        "Qwen2ForCausalLM", {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1}
    ),
    "qwen3": Recipe("Qwen3ForCausalLM", {"head_dim": 32}),
    "qwen3_window_on_no_layer": Recipe(
        "Qwen3ForCausalLM",
        {
            "head_dim": 32,
            "sliding_window": 32,
            "use_sliding_window": True,
            "layer_types": ["full_attention"] * TINY_TEXT["num_hidden_layers"],
        },
    ),
    "gemma3_text": Recipe("Gemma3ForCausalLM", GEMMA_TEXT | {"tie_word_embeddings": False}),
    "mixtral": Recipe("MixtralForCausalLM", {"num_local_experts": 5, "intermediate_size": 40, "sliding_window": 32}),
    "qwen2_moe": Recipe(
        "Qwen2MoeForCausalLM",
        {
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 56,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe": Recipe(
        "Qwen3MoeForCausalLM",
        {
            "head_dim": 32,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
        },
    ),
    "qwen2_moe_windows": Recipe(
        "Qwen2MoeForCausalLM",
        MOE | {"shared_expert_intermediate_size": 24, "use_sliding_window": True, "max_window_layers": 2},
    ),
    "qwen3_moe_windows": Recipe("Qwen3MoeForCausalLM", MOE | {"use_sliding_window": True}),
    "mistral": Recipe("MistralForCausalLM", {"sliding_window": 32}),
    "mistral_one_layer": Recipe("MistralForCausalLM", {"sliding_window": 32, "num_hidden_layers": 1}),
    "mistral_window_null": Recipe("MistralForCausalLM", {"sliding_window": None}),
}

LLAVA_RECIPES: Final[dict[str, Recipe]] = {
    "llava_clip_llama": Recipe("LlamaForCausalLM", vision_model="clip"),
    "llava_clip_full": Recipe(
        "LlamaForCausalLM", vision_model="clip", llava={"vision_feature_select_strategy": "full"}
    ),
    "llava_clip_several_layers": Recipe(
        "LlamaForCausalLM", vision_model="clip", llava={"vision_feature_layer": [-2, -1]}
    ),
    "llava_many_image_tokens": Recipe(
        "LlamaForCausalLM", {"tie_word_embeddings": True}, vision_model="clip", vision={"image_size": 126}
    ),
    "llava_siglip_qwen2": Recipe(
        "Qwen2ForCausalLM",
        {"tie_word_embeddings": True},
        vision_model="siglip",
        vision={"vision_use_head": False},
        llava={"vision_feature_select_strategy": "full", "vision_feature_layer": -1},
    ),
    "llava_siglip_qwen3": Recipe(
        "Qwen3ForCausalLM",
        {"head_dim": 32},
        vision_model="siglip",
        vision={"vision_use_head": False},
        llava={"vision_feature_select_strategy": "full", "vision_feature_layer": -2},
    ),
    "llava_clip_mistral": Recipe("MistralForCausalLM", {"sliding_window": 32}, vision_model="clip", spare_rows=35),
}

RECIPES: Final[dict[str, Recipe]] = TEXT_RECIPES | LLAVA_RECIPES
FAMILY_RECIPES: Final = LLAVA_FAMILY_RECIPES | VISION_RECIPES


def write_checkpoint(
    name: str, folder: Path, *, layout: Layout = "published", max_shard_size: str | None = None
) -> Path:
    """Write the checkpoint `name` of RECIPES or FAMILY_RECIPES into `folder` and return the folder.

    layout          "published": tensor names, config spellings and processor files as most checkpoints on the hub
                    have them; "transformers": as the installed transformers writes them; "nested": the same files,
                    tensor names as transformers 4.52 to 4.57 wrote them (`model.language_model.*`)
    max_shard_size  for example "100KB" for several files with an index; None: one file
    """
    if name in FAMILY_RECIPES:
        return _write_vision_checkpoint(name, folder, layout)
    recipe = RECIPES[name]
    tokenizer = build_tokenizer(with_image_token=recipe.vision_model is not None)
    model = _build_model(recipe, vocab_size=len(tokenizer) + recipe.spare_rows)
    model.save_pretrained(folder, max_shard_size=max_shard_size or "1GB")
    if recipe.vision_model is None:
        tokenizer.save_pretrained(folder)
    else:
        _build_processor(recipe, tokenizer).save_pretrained(folder)
    if layout != "transformers" and recipe.vision_model is not None:
        _rename_tensors(folder, PUBLISHED_NAMES if layout == "published" else NESTED_NAMES)
    if layout == "published":
        _respell_config(folder, recipe, model.config)
        _respell_processor(folder, is_llava=recipe.vision_model is not None)
    return folder


def _write_vision_checkpoint(name: str, folder: Path, layout: Layout) -> Path:
    recipe = FAMILY_RECIPES[name]
    model, processor = recipe.build(TINY_TEXT)
    randomise(model.eval())
    model.generation_config = transformers.GenerationConfig(bos_token_id=0, pad_token_id=0, eos_token_id=2)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    if layout != "transformers" and recipe.stored is not None:
        _store_tensors(folder / "model.safetensors", recipe.stored)
    if layout == "published":
        _rename_tensors(folder, recipe.published)
        config = _read(folder / "config.json")
        recipe.respell(config)
        _write(folder / "config.json", config)
        if recipe.respell_processor is not None:
            _respell_processor(folder, is_llava=True, respell=recipe.respell_processor)
    elif layout == "nested":
        _rename_tensors(folder, recipe.nested)
    return folder


def _build_model(recipe: Recipe, vocab_size: int) -> Any:
    text_config = _text_config(recipe, vocab_size)
    if recipe.vision_model is None:
        config, model_class = text_config, getattr(transformers, recipe.architecture)
    else:
        config, model_class = _llava_config(recipe, text_config), transformers.LlavaForConditionalGeneration
    model = model_class(config).eval()
    randomise(model)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=0, pad_token_id=0, eos_token_id=recipe.eos_token_ids
    )
    return model


def _text_config(recipe: Recipe, vocab_size: int) -> Any:
    config_class = getattr(transformers, recipe.architecture).config_class
    return config_class(
        **TINY_TEXT | {"vocab_size": vocab_size} | recipe.text, architectures=[recipe.architecture], dtype="float32"
    )


def _llava_config(recipe: Recipe, text_config: Any) -> Any:
    vision_class = {"clip": transformers.CLIPVisionConfig, "siglip": transformers.SiglipVisionConfig}
    assert recipe.vision_model is not None
    vision_config = vision_class[recipe.vision_model](**TINY_VISION | recipe.vision)
    return transformers.LlavaConfig(
        vision_config=vision_config,
        text_config=text_config,
        image_token_index=NUM_TEXT_TOKENS,
        image_seq_length=_num_image_tokens(recipe),
        dtype="float32",
        **recipe.llava,
    )


def _num_image_tokens(recipe: Recipe) -> int:
    vision = TINY_VISION | recipe.vision
    num_patches: int = (vision["image_size"] // vision["patch_size"]) ** 2
    class_token_kept = recipe.vision_model == "clip" and recipe.llava.get("vision_feature_select_strategy") == "full"
    return num_patches + int(class_token_kept)


def randomise(model: torch.nn.Module) -> None:
    """Random weights everywhere: transformers leaves norms at one and biases at zero, which would hide mistakes."""
    generator = torch.Generator().manual_seed(1234)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(1.0 + 0.2 * noise if is_norm else WEIGHT_STD * noise)


def _build_processor(recipe: Recipe, tokenizer: Any) -> Any:
    size = (TINY_VISION | recipe.vision)["image_size"]
    square = {"height": size, "width": size}
    if recipe.vision_model == "clip":
        image_processor = transformers.CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size=square)
    else:
        image_processor = transformers.SiglipImageProcessorPil(size=square)
    return transformers.LlavaProcessor(
        image_processor=image_processor,
        tokenizer=tokenizer,
        patch_size=TINY_VISION["patch_size"],
        vision_feature_select_strategy=recipe.llava.get("vision_feature_select_strategy", "default"),
        num_additional_image_tokens=1 if recipe.vision_model == "clip" else 0,
        chat_template=tokenizer.chat_template,
        image_token=IMAGE_TOKEN,
    )


def _rename_tensors(folder: Path, patterns: tuple[tuple[str, str], ...]) -> None:
    new_names = {}
    for file in folder.glob("*.safetensors"):
        renamed = {}
        for name, tensor in load_file(file).items():
            new_names[name] = name
            for pattern, replacement in patterns:
                new_names[name] = re.sub(pattern, replacement, name)
                if new_names[name] != name:
                    break
            renamed[new_names[name]] = tensor
        save_file(renamed, file, metadata={"format": "pt"})
    index_file = folder / "model.safetensors.index.json"
    if index_file.exists():
        index = _read(index_file)
        index["weight_map"] = {new_names[name]: file for name, file in index["weight_map"].items()}
        _write(index_file, index)


def _store_tensors(file: Path, stored: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    tensors = {name: stored(name, tensor).contiguous() for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def _respell_config(folder: Path, recipe: Recipe, config: Any) -> None:
    """Spell config.json as transformers 4 did: `rope_theta`, `torch_dtype`, no layer types, few fields of the text."""
    raw = _read(folder / "config.json")
    raw["torch_dtype"] = raw.pop("dtype")
    if recipe.vision_model is None:
        raw = _respell_text_config(raw, recipe)
    else:
        text = _respell_text_config(raw["text_config"], recipe)
        defaults = type(config.text_config)().to_dict()
        keep = {"model_type", "architectures"}
        raw["text_config"] = {
            key: value for key, value in text.items() if key in keep or key not in defaults or value != defaults[key]
        }
        raw["tie_word_embeddings"] = False  # what decides is the text model's, as in llava-interleave
    _write(folder / "config.json", raw)


def _respell_text_config(raw: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    text = raw | {key: value for key, value in recipe.text.items() if key.endswith("sliding_window")}
    text.pop("dtype", None)
    if "sliding_attention" in text["rope_parameters"]:
        respell_gemma3_text(text)
        return text
    if "layer_types" not in recipe.text:
        text.pop("layer_types", None)
    if text.get("head_dim") == text["hidden_size"] // text["num_attention_heads"]:
        del text["head_dim"]
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope.pop("rope_theta")
    if rope["rope_type"] not in ("default", "llama3"):
        rope["type"] = rope.pop("rope_type")
    text["rope_scaling"] = None if rope.get("rope_type") == "default" else rope
    return text


def _respell_processor(
    folder: Path, *, is_llava: bool, respell: Callable[[dict[str, Any]], None] | None = None
) -> None:
    """Move the chat template and the image processor into the files that transformers 4 kept them in."""
    tokenizer_config = _read(folder / "tokenizer_config.json")
    tokenizer_config["tokenizer_class"] = "PreTrainedTokenizerFast"
    template_file = folder / "chat_template.jinja"
    template = template_file.read_text()
    template_file.unlink()
    if is_llava:
        processor = _read(folder / "processor_config.json")
        image_processor = processor.pop("image_processor") | {"processor_class": processor["processor_class"]}
        if respell is not None:
            respell(image_processor)
        _write(folder / "preprocessor_config.json", image_processor)
        _write(folder / "processor_config.json", processor)
        _write(folder / "chat_template.json", {"chat_template": template})
    else:
        tokenizer_config["chat_template"] = template
    _write(folder / "tokenizer_config.json", tokenizer_config)


def _read(file: Path) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(file.read_text())
    return parsed


def _write(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")
