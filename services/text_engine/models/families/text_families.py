"""Families of models that read text only, by the architecture that config.json names."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from services.text_engine.models.families.gemma3 import GEMMA3_TEXT
from services.text_engine.models.families.interface import Family
from services.text_engine.models.families.llama import LLAMA
from services.text_engine.models.families.mistral import MISTRAL, MIXTRAL
from services.text_engine.models.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE

TEXT_FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": LLAMA,
        "MistralForCausalLM": MISTRAL,
        "Qwen2ForCausalLM": QWEN2,
        "Qwen3ForCausalLM": QWEN3,
        "Gemma3ForCausalLM": GEMMA3_TEXT,
        "MixtralForCausalLM": MIXTRAL,
        "Qwen2MoeForCausalLM": QWEN2_MOE,
        "Qwen3MoeForCausalLM": QWEN3_MOE,
    }
)
