"""Vision-language models: one of the text families, and where the checkpoint keeps it beside the vision encoder's part,
which another service loads.
"""

from __future__ import annotations

import dataclasses

from services.text_engine.models.config import Fields, ModelConfig
from services.text_engine.models.families.gemma3 import GEMMA_NORMS
from services.text_engine.models.families.interface import Family
from services.text_engine.models.families.qwen import qwen_windows
from services.text_engine.models.families.text_config import Defaults, merge_token_ids, read_dtype, read_text_config
from services.text_engine.models.families.text_families import TEXT_FAMILIES
from services.text_engine.models.rope_config import read_sectioned_rope

QWEN_VL_DEFAULTS = Defaults(
    hidden_size=8192,
    intermediate_size=29568,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    vocab_size=152_064,
    max_position_embeddings=32768,
    rms_norm_eps=1e-5,
)


def _read_llava(fields: Fields) -> ModelConfig:
    return _with_text_model(fields, default_image_token_id=32000)


def _read_llava_onevision(fields: Fields) -> ModelConfig:
    return _with_text_model(fields, default_image_token_id=151646, default_text_model="qwen2")


def _read_internvl(fields: Fields) -> ModelConfig:
    return _with_text_model(fields, default_image_token_id=151667, default_text_model="qwen2", default_tied=True)


def _read_mistral3(fields: Fields) -> ModelConfig:
    return _with_text_model(fields, default_image_token_id=10, default_tied=True)


def _read_gemma3(fields: Fields) -> ModelConfig:
    config = _with_text_model(
        fields, default_image_token_id=262144, default_text_model="gemma3_text", default_tied=True
    )
    num_rows = fields.integer("mm_tokens_per_image", 256)
    # Our rows of an image see all of it, transformers' only as far as the window: the same as long as an image fits.
    if any(window is not None and window < num_rows for window in config.sliding_windows):
        raise fields.error("mm_tokens_per_image", "an image must fit into the text model's sliding_window")
    return dataclasses.replace(config, image_mark_id=fields.integer("boi_token_index", 255999, minimum=0))


def _read_qwen_vl(fields: Fields) -> ModelConfig:
    """As published, the text model's fields stand among the others; transformers 5 nests them."""
    text = fields.nested("text_config") if "text_config" in fields else fields
    config = read_text_config(text, QWEN_VL_DEFAULTS, read_sectioned_rope(text))
    return dataclasses.replace(
        config,
        qkv_bias=True,
        sliding_windows=qwen_windows(text, config.num_layers),
        tie_word_embeddings=config.tie_word_embeddings or fields.boolean("tie_word_embeddings", False),
        image_token_id=fields.integer("image_token_id", 151655, minimum=0),
        eos_token_ids=merge_token_ids(fields.token_ids("eos_token_id"), config.eos_token_ids),
        dtype=read_dtype(fields) or config.dtype,
    )


def _read_smolvlm(fields: Fields) -> ModelConfig:
    return _with_text_model(fields, default_image_token_id=128257)


def _with_text_model(
    fields: Fields, *, default_image_token_id: int, default_text_model: str = "llama", default_tied: bool = False
) -> ModelConfig:
    """A vision-language model around one of the text families."""
    text = fields.nested("text_config")
    model_type = text.raw("model_type") or default_text_model
    family = next((family for family in TEXT_FAMILIES.values() if family.model_type == model_type), None)
    if family is None:
        raise text.error(
            "model_type", f"supported text models: {', '.join(f.model_type for f in TEXT_FAMILIES.values())}"
        )
    config = family.read_config(text)
    image_token = "image_token_id" if "image_token_id" in fields else "image_token_index"
    return dataclasses.replace(
        config,
        # Either place may say it: transformers 5 writes both, older checkpoints only the text model's.
        tie_word_embeddings=config.tie_word_embeddings or fields.boolean("tie_word_embeddings", default_tied),
        image_token_id=fields.integer(image_token, default_image_token_id, minimum=0),
        eos_token_ids=merge_token_ids(fields.token_ids("eos_token_id"), config.eos_token_ids),
        dtype=read_dtype(fields) or config.dtype,
    )


LLAVA = Family(
    "llava",
    _read_llava,
    prefixes=(
        ("language_model.model.", ""),  # as published, and as transformers 5 writes
        ("language_model.lm_head.", "lm_head."),
        ("model.language_model.", ""),  # as transformers 4.52 to 4.57 wrote
        ("lm_head.", "lm_head."),
    ),
    ignored=(
        *("vision_tower.", "multi_modal_projector.", "image_newline"),
        *("model.vision_tower.", "model.multi_modal_projector.", "model.image_newline"),
    ),
)
LLAVA_ONEVISION = dataclasses.replace(LLAVA, model_type="llava_onevision", read_config=_read_llava_onevision)
INTERNVL = dataclasses.replace(LLAVA, model_type="internvl", read_config=_read_internvl)
MISTRAL3 = dataclasses.replace(LLAVA, model_type="mistral3", read_config=_read_mistral3)
GEMMA3 = dataclasses.replace(LLAVA, model_type="gemma3", read_config=_read_gemma3, renamed=GEMMA_NORMS)
SMOLVLM = Family(
    "smolvlm",
    _read_smolvlm,
    prefixes=(("model.text_model.", ""), ("lm_head.", "lm_head.")),
    ignored=("model.vision_model.", "model.connector."),
)
QWEN2_5_VL = Family(
    "qwen2_5_vl",
    _read_qwen_vl,
    prefixes=(("model.language_model.", ""), ("model.", ""), ("lm_head.", "lm_head.")),
    ignored=("visual.", "model.visual."),
)
QWEN2_VL = dataclasses.replace(QWEN2_5_VL, model_type="qwen2_vl")
