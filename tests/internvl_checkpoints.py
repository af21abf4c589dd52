"""Tiny InternVL: tiles of 56 x 56, 4 x 4 patches, 2 x 2 of them in a row: 4 rows a tile."""

from __future__ import annotations

from typing import Any, Final

import transformers
from transformers.processing_utils import ProcessorMixin

from tests.tiny_tokenizer import build_tokenizer

SPECIAL_TOKENS: Final = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
# As published: a line ends behind each picture.
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}"
    "{% elif content['type'] == 'video' %}{{ '<video>\n' }}"
    "{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOWER: Final[dict[str, Any]] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 56,
    "patch_size": 14,
    "attention_bias": True,
}
# InternVL3's is stretched so beyond the length it was trained for.
DYNAMIC_ROPE: Final[dict[str, Any]] = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
IMAGENET: Final = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}


class InternVLProcessor(transformers.InternVLProcessor):  # type: ignore[misc]
    """transformers' own, without its part for videos, which needs torchvision."""

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        image_seq_length: int = 256,
        chat_template: str | None = None,
    ) -> None:
        super().__init__(image_processor, tokenizer, None, image_seq_length, chat_template)

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        if argument_name != "video_processor":
            ProcessorMixin.check_argument_for_proper_class(self, argument_name, argument)


def build_internvl(
    text: dict[str, Any], *, text_model: str = "Qwen2", vision: dict[str, Any] | None = None, max_patches: int = 12
) -> tuple[Any, Any]:
    tokenizer = build_tokenizer(with_image_token=False)
    tokenizer.add_tokens(list(SPECIAL_TOKENS.values()), special_tokens=True)
    tokenizer._set_model_specific_special_tokens(special_tokens=SPECIAL_TOKENS)
    tokenizer.chat_template = CHAT_TEMPLATE
    text_config = getattr(transformers, f"{text_model}Config")(**text, vocab_size=len(tokenizer))
    config = transformers.InternVLConfig(
        text_config=text_config,
        vision_config=transformers.InternVLVisionConfig(**TOWER | (vision or {})),
        image_token_id=tokenizer.context_image_token_id,
        image_seq_length=4,
        tie_word_embeddings=False,
        dtype="float32",
    )
    processor = InternVLProcessor(
        image_processor=transformers.GotOcr2ImageProcessorPil(
            size={"height": 56, "width": 56}, max_patches=max_patches, **IMAGENET
        ),
        tokenizer=tokenizer,
        image_seq_length=4,
        chat_template=CHAT_TEMPLATE,
    )
    return transformers.InternVLForConditionalGeneration(config), processor


def respell_internvl(config: dict[str, Any]) -> None:
    config["torch_dtype"] = config.pop("dtype")
    text = config["text_config"]
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope.pop("rope_theta")
    text["rope_scaling"] = None if rope["rope_type"] == "default" else rope | {"type": rope["rope_type"]}
    text.pop("layer_types", None)
