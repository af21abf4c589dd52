"""Tiny checkpoints of LLaVA's relatives: VIP-LLaVA, LLaVA-NeXT and LLaVA-OneVision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import transformers
from transformers.processing_utils import ProcessorMixin

from tests.tiny_tokenizer import IMAGE_TOKEN, build_tokenizer
from tests.vision_checkpoints import TINY_TOWER, VisionRecipe

PUBLISHED_NAMES: Final = ((r"^vision_tower\.", "vision_tower.vision_model."),)
NESTED_NAMES: Final = (
    (r"^vision_tower\.", "model.vision_tower.vision_model."),
    (r"^(multi_modal_projector\.|image_newline)", r"model.\1"),
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^language_model\.model\.", "model.language_model."),
)

# LLaVA-1.6's and LLaVA-OneVision's, in tiles.
NEXT_GRIDS: Final = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
ONEVISION_GRIDS: Final = tuple((down, across) for down in range(1, 7) for across in range(1, 7))


class OnevisionImageProcessor(transformers.LlavaOnevisionProcessor):
    """transformers' own without its video half, which needs a package of its own."""

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        num_image_tokens: int | None = None,
        vision_feature_select_strategy: str | None = None,
        vision_aspect_ratio: str = "anyres_max_9",
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.num_image_tokens = num_image_tokens
        self.vision_feature_select_strategy = vision_feature_select_strategy
        self.vision_aspect_ratio = vision_aspect_ratio
        self.image_token, self.video_token = IMAGE_TOKEN, "<video>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
        self.video_token_id = None
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def load_processor(folder: Path) -> Any:
    """The folder's processor, for images."""
    kind = transformers.AutoConfig.from_pretrained(folder).model_type
    if kind == "llava_onevision":
        return OnevisionImageProcessor.from_pretrained(folder)
    return transformers.AutoProcessor.from_pretrained(folder, backend="pil")


def _tower(kind: str, side: int, fields: dict[str, Any]) -> Any:
    config_class = transformers.CLIPVisionConfig if kind == "clip" else transformers.SiglipVisionConfig
    head = {} if kind == "clip" else {"vision_use_head": False}
    return config_class(**TINY_TOWER | {"image_size": side, "patch_size": 14} | head | fields)


def _model(kind: str, text_model: str, text: dict[str, Any], tokenizer: Any, **fields: Any) -> Any:
    text_config = getattr(transformers, f"{text_model}Config")(**text, vocab_size=len(tokenizer))
    config = getattr(transformers, f"{kind}Config")(
        text_config=text_config,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        dtype="float32",
        **fields,
    )
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


def _vip(text: dict[str, Any]) -> tuple[Any, Any]:
    """Features of three layers of the tower, in an order that is not theirs."""
    tokenizer = build_tokenizer(with_image_token=True)
    tower = _tower("clip", 56, {})
    model = _model("VipLlava", "Llama", text, tokenizer, vision_config=tower, vision_feature_layer=[-2, -1, 1])
    square = {"height": 56, "width": 56}
    processor = transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size=square),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
        image_token=IMAGE_TOKEN,
    )
    return model, processor


def _old_vip_spelling(config: dict[str, Any]) -> None:
    config["vision_feature_layers"] = config.pop("vision_feature_layer")


def _next(
    text: dict[str, Any],
    *,
    text_model: str = "Llama",
    tower: str = "clip",
    side: int = 56,
    vision: dict[str, Any] | None = None,
    **fields: Any,
) -> tuple[Any, Any]:
    tokenizer = build_tokenizer(with_image_token=True)
    pinpoints = [[down * side, across * side] for down, across in NEXT_GRIDS]
    model = _model(
        "LlavaNext",
        text_model,
        text,
        tokenizer,
        vision_config=_tower(tower, side, vision or {}),
        image_grid_pinpoints=pinpoints,
        **fields,
    )
    processor = transformers.LlavaNextProcessor(
        image_processor=transformers.LlavaNextImageProcessorPil(
            size={"shortest_edge": side}, crop_size={"height": side, "width": side}, image_grid_pinpoints=pinpoints
        ),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy=fields.get("vision_feature_select_strategy", "default"),
        num_additional_image_tokens=1 if tower == "clip" else 0,
        chat_template=tokenizer.chat_template,
        image_token=IMAGE_TOKEN,
    )
    return model, processor


def _onevision(
    text: dict[str, Any], *, side: int = 56, max_tiles: int = 9, vision: dict[str, Any] | None = None
) -> tuple[Any, Any]:
    tokenizer = build_tokenizer(with_image_token=True)
    pinpoints = [[down * side, across * side] for down, across in ONEVISION_GRIDS]
    ratio = f"anyres_max_{max_tiles}"
    model = _model(
        "LlavaOnevision",
        "Qwen2",
        text | {"tie_word_embeddings": True},
        tokenizer,
        vision_config=_tower("siglip", side, vision or {}),
        image_grid_pinpoints=pinpoints,
        vision_aspect_ratio=ratio,
        video_token_index=len(tokenizer),
    )
    processor = OnevisionImageProcessor(
        image_processor=transformers.LlavaOnevisionImageProcessorPil(
            size={"height": side, "width": side},
            image_grid_pinpoints=pinpoints,
            image_mean=[0.5, 0.5, 0.5],
            image_std=[0.5, 0.5, 0.5],
        ),
        tokenizer=tokenizer,
        num_image_tokens=(side // 14) ** 2,
        vision_feature_select_strategy="full",
        vision_aspect_ratio=ratio,
        chat_template=tokenizer.chat_template,
    )
    return model, processor


def _recipe(
    build: Callable[[dict[str, Any]], tuple[Any, Any]], respell: Callable[[dict[str, Any]], None] = lambda config: None
) -> VisionRecipe:
    return VisionRecipe(build, PUBLISHED_NAMES, respell, NESTED_NAMES)


# The towers of the last two have the real image sizes and almost no width: for counting rows.
NARROW: Final[dict[str, Any]] = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
}
LLAVA_FAMILY_RECIPES: Final[dict[str, VisionRecipe]] = {
    "vip_llava": _recipe(_vip, _old_vip_spelling),
    "llava_next_vicuna": _recipe(_next),
    "llava_next_mistral": _recipe(lambda text: _next(text, text_model="Mistral")),
    "llava_next_siglip": _recipe(
        lambda text: _next(
            text, text_model="Qwen2", tower="siglip", vision_feature_layer=-1, vision_feature_select_strategy="full"
        )
    ),
    "llava_onevision": _recipe(_onevision),
    "llava_onevision_max_2": _recipe(lambda text: _onevision(text, max_tiles=2)),
    "llava_next_336": _recipe(lambda text: _next(text, side=336, vision=NARROW)),
    "llava_onevision_384": _recipe(lambda text: _onevision(text, side=384, vision=NARROW)),
}
