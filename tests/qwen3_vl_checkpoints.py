"""Tiny Qwen3-VL, dense and with experts: patches of 8 x 8, cells of 2 x 2, so that a picture has a row for each 16 x 16
pixels; 6 x 6 learned positions; rows of two tower layers beside those of the last.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import transformers

from tests.tiny_tokenizer import build_tokenizer

SPECIAL_TOKENS: Final = {
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
}
# The published one without tools.
CHAT_TEMPLATE: Final = (
    "{%- set image_count = namespace(value=0) %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.content is string %}{{- message.content }}"
    "{%- else %}{%- for content in message.content %}"
    "{%- if content.type == 'image' or 'image' in content or 'image_url' in content %}"
    "{%- set image_count.value = image_count.value + 1 %}"
    "{%- if add_vision_id %}Picture {{ image_count.value }}: {% endif -%}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{%- elif 'text' in content %}{{- content.text }}{%- endif %}"
    "{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
TEXT: Final[dict[str, Any]] = {
    "head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": False,
}
# An ordinary layer among them.
EXPERTS: Final[dict[str, Any]] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [1],
}
TOWER: Final[dict[str, Any]] = {
    "depth": 4,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_heads": 3,
    "patch_size": 8,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 2],
}
HALF: Final = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


class Qwen3VLProcessor(transformers.Qwen3VLProcessor):  # type: ignore[misc]
    """transformers' own, without its part for videos, which needs torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        self.image_token, self.video_token = SPECIAL_TOKENS["image"], SPECIAL_TOKENS["video"]
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        transformers.ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def build_qwen3_vl(text: dict[str, Any]) -> tuple[Any, Any]:
    return _build("Qwen3VL", text | TEXT)


def build_qwen3_vl_moe(text: dict[str, Any]) -> tuple[Any, Any]:
    return _build("Qwen3VLMoe", text | TEXT | EXPERTS)


def _build(kind: str, text: dict[str, Any]) -> tuple[Any, Any]:
    """Model and processor."""
    tokenizer = build_tokenizer(with_image_token=False)
    tokenizer.add_tokens(list(SPECIAL_TOKENS.values()), special_tokens=True)
    tokenizer.chat_template = CHAT_TEMPLATE
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in SPECIAL_TOKENS.items()}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text | {"vocab_size": len(tokenizer)},
        vision_config=TOWER | {"out_hidden_size": text["hidden_size"]},
        dtype="float32",
        **ids,
    )
    size = {"shortest_edge": 32 * 32, "longest_edge": 96 * 96}
    processor = Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessorPil(size=size, patch_size=8, **HALF),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    )
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config), processor


def respell_qwen3_vl(config: dict[str, Any]) -> None:
    """config.json as published: the tower had the whole model's type, and only the text model's part said a dtype."""
    text = config["text_config"]
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope.pop("rope_theta")
    text["rope_scaling"] = rope
    text["dtype"] = config.pop("dtype")
    if "num_local_experts" in text:
        text["num_experts"] = text.pop("num_local_experts")
    config["vision_config"]["model_type"] = config["model_type"]


def experts_transposed(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """As published: what goes into an expert is the first of its matrices' dimensions."""
    return tensor.transpose(1, 2) if ".experts." in name else tensor
