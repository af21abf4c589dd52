"""Tiny checkpoints of the vision-language families that are not LLaVA's: their own configs, towers and processors.

`build` makes model and processor for `tests.checkpoints.write_checkpoint`, which fills in the weights and writes them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import transformers

from tests.internvl_checkpoints import DYNAMIC_ROPE, InternVLProcessor, build_internvl, respell_internvl
from tests.qwen2_vl_checkpoints import (
    Qwen2_5_VLProcessor,
    Qwen2VLProcessor,
    build_qwen2_5_vl,
    build_qwen2_vl,
    respell_pixels,
    respell_qwen2_vl,
)
from tests.qwen3_vl_checkpoints import (
    Qwen3VLProcessor,
    build_qwen3_vl,
    build_qwen3_vl_moe,
    experts_transposed,
    respell_qwen3_vl,
)
from tests.tiny_tokenizer import build_tokenizer

# Parts of a conversation in a row, images as `{mark}`.
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ 'IMAGE_MARK' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TINY_TOWER: Final[dict[str, Any]] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
}


@dataclass(frozen=True)
class VisionRecipe:
    """build(fields of the text model's config) -> model, processor

    published   (pattern, replacement) over the tensor names that transformers writes, as the hub has them
    respell     config.json, changed in place, as the hub has it
    nested      like `published`, as transformers 4.52 to 4.57 wrote them
    respell_processor   the image processor's fields, changed in place, before they move to preprocessor_config.json;
                        None: they stay in processor_config.json
    stored      name, tensor -> the tensor as the hub has it; None: as transformers 5 writes it
    """

    build: Callable[[dict[str, Any]], tuple[Any, Any]]
    published: tuple[tuple[str, str], ...] = ()
    respell: Callable[[dict[str, Any]], None] = field(default=lambda config: None)
    nested: tuple[tuple[str, str], ...] = ()
    respell_processor: Callable[[dict[str, Any]], None] | None = None
    stored: Callable[[str, torch.Tensor], torch.Tensor] | None = None


def _tokenizer(mark: str, *special: str) -> Any:
    """The tiny tokenizer with `mark` and others as special tokens, and a template that writes `mark` for an image."""
    tokenizer = build_tokenizer(with_image_token=False)
    tokenizer.add_tokens([mark, *special], special_tokens=True)
    tokenizer.chat_template = CHAT_TEMPLATE.replace("IMAGE_MARK", mark)
    return tokenizer


# --- SmolVLM and Idefics3 ---------------------------------------------------------------------------------------------


def _idefics3(
    text: dict[str, Any], *, kind: str = "Idefics3", vision: dict[str, Any] | None = None, **processing: Any
) -> tuple[Any, Any]:
    """Tiles of 56 x 56, 4 x 4 patches, 2 x 2 of them in a row: 4 rows a tile."""
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    tokenizer = _tokenizer("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *tiles)
    vision = TINY_TOWER | {"image_size": 56, "patch_size": 14} | (vision or {})
    config_class = getattr(transformers, f"{kind}Config")
    config = config_class(
        text_config=transformers.LlamaConfig(**text, vocab_size=len(tokenizer), rms_norm_eps=1e-5).to_dict(),
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        tie_word_embeddings=False,
        dtype="float32",
    )
    image_processor = getattr(transformers, f"{kind}ImageProcessorPil")(
        **{"size": {"longest_edge": 3 * 56}, "max_image_size": {"longest_edge": 56}} | processing
    )
    # SmolVLM's own processor needs a package for videos; for images it writes the same text.
    processor = transformers.Idefics3Processor(
        image_processor=image_processor, tokenizer=tokenizer, image_seq_len=4, chat_template=tokenizer.chat_template
    )
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config), processor


# --- Pixtral and Mistral 3 --------------------------------------------------------------------------------------------


def processor_class(name: str) -> Any:
    """A processor of transformers by the name that it is saved under, also where it wants packages we do not have."""
    if name == "PixtralProcessor":
        return _pixtral_processor_class()
    without_videos = (InternVLProcessor, Qwen2VLProcessor, Qwen2_5_VLProcessor, Qwen3VLProcessor)
    return {each.__name__: each for each in without_videos}.get(name) or getattr(transformers, name)


def _pixtral_processor_class() -> Any:
    """Its module wants one function out of a file that needs torchvision; the file for Pillow has the same one."""
    from transformers.models.pixtral import image_processing_pil_pixtral

    sys.modules.setdefault("transformers.models.pixtral.image_processing_pixtral", image_processing_pil_pixtral)
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

    return PixtralProcessor


def _pixtral_parts(text: dict[str, Any], side: int, **processing: Any) -> tuple[Any, dict[str, Any], Any]:
    """Patches of 8 x 8 in a box of side x side."""
    tokenizer = _tokenizer("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    fields = {
        "text_config": transformers.MistralConfig(**text, vocab_size=len(tokenizer), sliding_window=None, head_dim=24),
        "vision_config": transformers.PixtralVisionConfig(
            **TINY_TOWER, image_size=side, patch_size=8, hidden_act="silu", rope_theta=10000.0
        ),
        "image_token_index": tokenizer.convert_tokens_to_ids("[IMG]"),
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    processor = _pixtral_processor_class()(
        image_processor=transformers.PixtralImageProcessorPil(
            size={"longest_edge": side}, patch_size={"height": 8, "width": 8}
        ),
        tokenizer=tokenizer,
        patch_size=8,
        chat_template=tokenizer.chat_template,
        **processing,
    )
    return tokenizer, fields, processor


def _pixtral(text: dict[str, Any]) -> tuple[Any, Any]:
    _, fields, processor = _pixtral_parts(text, side=80)
    config = transformers.LlavaConfig(
        **fields, vision_feature_layer=-1, vision_feature_select_strategy="full", image_seq_length=1
    )
    return transformers.LlavaForConditionalGeneration(config), processor


def _mistral3(text: dict[str, Any], **changes: Any) -> tuple[Any, Any]:
    _, fields, processor = _pixtral_parts(text, side=112, spatial_merge_size=2)
    config = transformers.Mistral3Config(**fields, spatial_merge_size=2, **changes)
    return transformers.Mistral3ForConditionalGeneration(config), processor


# --- Gemma 3 ----------------------------------------------------------------------------------------------------------

GEMMA_TEXT: Final[dict[str, Any]] = {
    "head_dim": 24,
    "num_hidden_layers": 4,
    "query_pre_attn_scalar": 20,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}


def _gemma3(text: dict[str, Any], **changes: Any) -> tuple[Any, Any]:
    """Pictures of 112 x 112, 8 x 8 patches, 2 x 2 of them in a row: 16 rows."""
    tokenizer = _tokenizer("<start_of_image>", "<end_of_image>", "<image_soft_token>")
    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer._set_model_specific_special_tokens(special_tokens=names)
    ids = {f"{name}_index": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**text | GEMMA_TEXT | changes, vocab_size=len(tokenizer)),
        vision_config=transformers.SiglipVisionConfig(
            **TINY_TOWER, image_size=112, patch_size=14, vision_use_head=False
        ),
        mm_tokens_per_image=16,
        tie_word_embeddings=changes.get("tie_word_embeddings", True),
        dtype="float32",
        **ids,
    )
    processor = transformers.Gemma3Processor(
        image_processor=transformers.Gemma3ImageProcessorPil(size={"height": 112, "width": 112}),
        tokenizer=tokenizer,
        image_seq_length=16,
        chat_template=tokenizer.chat_template,
    )
    return transformers.Gemma3ForConditionalGeneration(config), processor


# --- as the hub has them ----------------------------------------------------------------------------------------------

NESTED_TEXT: Final = (
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^language_model\.model\.", "model.language_model."),
    (r"^multi_modal_projector\.", "model.multi_modal_projector."),
)
PIXTRAL_NESTED: Final = (*NESTED_TEXT, (r"^vision_tower\.", "model.vision_tower."))
GEMMA_NESTED: Final = (*NESTED_TEXT, (r"^vision_tower\.", "model.vision_tower.vision_model."))
GEMMA_PUBLISHED: Final = ((r"^vision_tower\.", "vision_tower.vision_model."),)
QWEN_NESTED: Final = ((r"^visual\.", "model.visual."), (r"^model\.", "model.language_model."))


def _respell(config: dict[str, Any]) -> None:
    """The base of the rotary positions stood alone before transformers 5."""
    config["torch_dtype"] = config.pop("dtype")
    for part in ("vision_config", "text_config"):
        if rope := config[part].pop("rope_parameters", None):
            config[part]["rope_theta"] = rope["rope_theta"]


def respell_gemma3_text(text: dict[str, Any]) -> None:
    """Of two sets of rotary parameters one was scattered over the config; layers alternated by a number."""
    rope = text.pop("rope_parameters")
    text["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    text["rope_theta"] = rope["full_attention"].pop("rope_theta")
    text["rope_scaling"] = rope["full_attention"]
    del text["layer_types"]
    text["sliding_window_pattern"] = 2
    defaults = transformers.Gemma3TextConfig().to_dict()
    for name in [name for name in text if name in defaults and text[name] == defaults[name]]:
        if name not in ("model_type", "architectures"):
            del text[name]


def _respell_gemma3(config: dict[str, Any]) -> None:
    config["torch_dtype"] = config.pop("dtype")
    respell_gemma3_text(config["text_config"])


def _no_change(fields: dict[str, Any]) -> None:
    pass


VISION_RECIPES: Final[dict[str, VisionRecipe]] = {
    "idefics3": VisionRecipe(_idefics3, respell=_respell, respell_processor=_no_change),
    "smolvlm": VisionRecipe(
        lambda text: _idefics3(text, kind="SmolVLM"), respell=_respell, respell_processor=_no_change
    ),
    # 12 positions a side of which a tile has 4; fp32 rounding moves some.
    "smolvlm_other_tile": VisionRecipe(
        lambda text: _idefics3(text, kind="SmolVLM", vision={"image_size": 168}, size={"longest_edge": 2 * 56})
    ),
    "smolvlm_unsplit": VisionRecipe(lambda text: _idefics3(text, kind="SmolVLM", do_image_splitting=False)),
    "pixtral": VisionRecipe(_pixtral, nested=PIXTRAL_NESTED, respell=_respell, respell_processor=_no_change),
    "mistral3": VisionRecipe(_mistral3, nested=PIXTRAL_NESTED, respell=_respell, respell_processor=_no_change),
    "mistral3_inner_layer": VisionRecipe(
        lambda text: _mistral3(text, vision_feature_layer=-2, multimodal_projector_bias=True)
    ),
    "gemma3": VisionRecipe(
        _gemma3,
        published=GEMMA_PUBLISHED,
        nested=GEMMA_NESTED,
        respell=_respell_gemma3,
        respell_processor=_no_change,
    ),
    # With a head of its own: one that is tied to large embeddings says the same word over and over.
    "gemma3_untied": VisionRecipe(lambda text: _gemma3(text, tie_word_embeddings=False)),
    "internvl": VisionRecipe(
        lambda text: build_internvl(text | {"rope_parameters": DYNAMIC_ROPE}),
        nested=PIXTRAL_NESTED,
        respell=respell_internvl,
        respell_processor=_no_change,
    ),
    # The tower of the largest ones, with 6 billion weights.
    "internvl_6b_tower": VisionRecipe(
        lambda text: build_internvl(
            text | {"head_dim": 32},
            text_model="Qwen3",
            vision={"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": False},
            max_patches=6,
        ),
        nested=PIXTRAL_NESTED,
        respell=respell_internvl,
        respell_processor=_no_change,
    ),
    "internvl_last_norm": VisionRecipe(
        lambda text: build_internvl(text, text_model="Llama", vision={"use_mean_pooling": False}),
        respell_processor=_no_change,
    ),
    "qwen2_vl": VisionRecipe(
        build_qwen2_vl, nested=QWEN_NESTED, respell=respell_qwen2_vl, respell_processor=respell_pixels
    ),
    "qwen2_5_vl": VisionRecipe(
        build_qwen2_5_vl, nested=QWEN_NESTED, respell=respell_qwen2_vl, respell_processor=respell_pixels
    ),
    "qwen3_vl": VisionRecipe(build_qwen3_vl, respell=respell_qwen3_vl, respell_processor=_no_change),
    "qwen3_vl_moe": VisionRecipe(
        build_qwen3_vl_moe,
        respell=respell_qwen3_vl,
        respell_processor=_no_change,
        stored=experts_transposed,
    ),
}
