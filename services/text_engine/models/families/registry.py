"""The families that the engine's own decoder serves, by the architecture that config.json names."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from services.text_engine.models.families.interface import Family
from services.text_engine.models.families.qwen3_vl import QWEN3_VL, QWEN3_VL_MOE
from services.text_engine.models.families.text_families import TEXT_FAMILIES
from services.text_engine.models.families.vision_language import (
    GEMMA3,
    INTERNVL,
    LLAVA,
    LLAVA_ONEVISION,
    MISTRAL3,
    QWEN2_5_VL,
    QWEN2_VL,
    SMOLVLM,
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        **TEXT_FAMILIES,
        "LlavaForConditionalGeneration": LLAVA,
        "LlavaNextForConditionalGeneration": LLAVA,
        "LlavaOnevisionForConditionalGeneration": LLAVA_ONEVISION,
        "VipLlavaForConditionalGeneration": LLAVA,
        "Idefics3ForConditionalGeneration": SMOLVLM,
        "Gemma3ForConditionalGeneration": GEMMA3,
        "InternVLForConditionalGeneration": INTERNVL,
        "Mistral3ForConditionalGeneration": MISTRAL3,
        "Qwen2VLForConditionalGeneration": QWEN2_VL,
        "Qwen2_5_VLForConditionalGeneration": QWEN2_5_VL,
        "Qwen3VLForConditionalGeneration": QWEN3_VL,
        "Qwen3VLMoeForConditionalGeneration": QWEN3_VL_MOE,
        "SmolVLMForConditionalGeneration": SMOLVLM,
    }
)
