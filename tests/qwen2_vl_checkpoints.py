"""Tiny Qwen2-VL and Qwen2.5-VL: patches of 8 x 8, cells of 2 x 2, windows of 2 x 2 cells: a picture has a row for each
16 x 16 pixels.
"""

from __future__ import annotations

from typing import Any, Final

import transformers

from tests.tiny_tokenizer import build_tokenizer

# As published: a system message of its own, and pictures numbered on request.
CHAT_TEMPLATE: Final = (
    "{% set image_count = namespace(value=0) %}{% set video_count = namespace(value=0) %}"
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "{% set image_count.value = image_count.value + 1 %}"
    "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' or 'video' in content %}"
    "{% set video_count.value = video_count.value + 1 %}"
    "{% if add_vision_id %}Video {{ video_count.value }}: {% endif %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class _WithoutVideos:
    """The part for videos needs torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        transformers.ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


class Qwen2VLProcessor(_WithoutVideos, transformers.Qwen2VLProcessor):  # type: ignore[misc]
    pass


class Qwen2_5_VLProcessor(_WithoutVideos, transformers.Qwen2_5_VLProcessor):  # type: ignore[misc]  # noqa: N801
    pass


QWEN2_VL_TOWER: Final[dict[str, Any]] = {
    "depth": 4,
    "embed_dim": 48,
    "mlp_ratio": 2,
    "num_heads": 3,
    "patch_size": 8,
    "hidden_size": 64,
}
QWEN2_5_VL_TOWER: Final[dict[str, Any]] = {
    "depth": 4,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_heads": 3,
    "patch_size": 8,
    "window_size": 32,
    "fullatt_block_indexes": [1, 3],
    "out_hidden_size": 64,
}


def _build(
    text: dict[str, Any], *, kind: str, tower: dict[str, Any], processor_class: type[_WithoutVideos], **changes: Any
) -> tuple[Any, Any]:
    tokenizer = build_tokenizer(with_image_token=False)
    tokenizer.add_tokens(["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"], special_tokens=True)
    tokenizer.chat_template = CHAT_TEMPLATE
    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(token)
        for name, token in (
            ("image", "<|image_pad|>"),
            ("video", "<|video_pad|>"),
            ("vision_start", "<|vision_start|>"),
            ("vision_end", "<|vision_end|>"),
        )
    }
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text | {"vocab_size": len(tokenizer), "rope_parameters": rope, "rms_norm_eps": 1e-6},
        vision_config=tower,
        dtype="float32",
        **ids,
        **changes,
    )
    processor = processor_class(
        image_processor=transformers.Qwen2VLImageProcessorPil(
            size={"shortest_edge": 32 * 32, "longest_edge": 96 * 96}, patch_size=8
        ),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config), processor


def build_qwen2_vl(text: dict[str, Any]) -> tuple[Any, Any]:
    """Its head tied to the embeddings, as in the smallest one."""
    return _build(
        text, kind="Qwen2VL", tower=QWEN2_VL_TOWER, processor_class=Qwen2VLProcessor, tie_word_embeddings=True
    )


def build_qwen2_5_vl(text: dict[str, Any]) -> tuple[Any, Any]:
    return _build(text, kind="Qwen2_5_VL", tower=QWEN2_5_VL_TOWER, processor_class=Qwen2_5_VLProcessor)


def respell_qwen2_vl(config: dict[str, Any]) -> None:
    """The text model's fields stood among the others."""
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope["rope_theta"]
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    del text["layer_types"], text["model_type"], config["vision_config"]["model_type"]
    config.update(text)
    config["torch_dtype"] = config.pop("dtype")


def respell_pixels(fields: dict[str, Any]) -> None:
    """The budget of pixels, as Qwen2-VL and Qwen2.5-VL were published with it."""
    size = fields.pop("size")
    fields["min_pixels"], fields["max_pixels"] = size["shortest_edge"], size["longest_edge"]
