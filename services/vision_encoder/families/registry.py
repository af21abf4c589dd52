"""Which architectures the encoder takes. Adding a family is its file and a line here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from services.vision_encoder.errors import UnsupportedCheckpoint
from services.vision_encoder.families.gemma3 import load_gemma3
from services.vision_encoder.families.interface import Family
from services.vision_encoder.families.internvl import load_internvl
from services.vision_encoder.families.llava import load_llava, load_vip_llava
from services.vision_encoder.families.llava_next import load_llava_next, load_llava_onevision
from services.vision_encoder.families.pixtral import load_mistral3, load_pixtral
from services.vision_encoder.families.qwen2_5_vl import load_qwen2_5_vl
from services.vision_encoder.families.qwen2_vl import load_qwen2_vl
from services.vision_encoder.families.qwen3_vl import load_qwen3_vl
from services.vision_encoder.families.smolvlm import load_smolvlm


def _load_llava(folder: Path, config: dict[str, Any]) -> Family:
    """Pixtral was published under LLaVA's name; the tower tells."""
    is_pixtral = (config.get("vision_config") or {}).get("model_type") == "pixtral"
    return load_pixtral(folder, config) if is_pixtral else load_llava(folder, config)


# architecture -> (folder, config.json) -> the family, weights read and digested
LOADERS: Final[dict[str, Callable[[Path, dict[str, Any]], Family]]] = {
    "LlavaForConditionalGeneration": _load_llava,
    "LlavaNextForConditionalGeneration": load_llava_next,
    "LlavaOnevisionForConditionalGeneration": load_llava_onevision,
    "VipLlavaForConditionalGeneration": load_vip_llava,
    "Gemma3ForConditionalGeneration": load_gemma3,
    "Idefics3ForConditionalGeneration": load_smolvlm,
    "InternVLForConditionalGeneration": load_internvl,
    "Mistral3ForConditionalGeneration": load_mistral3,
    "Qwen2VLForConditionalGeneration": load_qwen2_vl,
    "Qwen2_5_VLForConditionalGeneration": load_qwen2_5_vl,
    "Qwen3VLForConditionalGeneration": load_qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": load_qwen3_vl,
    "SmolVLMForConditionalGeneration": load_smolvlm,
}


def load_family(folder: Path) -> Family:
    """The model in `folder`, weights read and digested. Raises UnsupportedCheckpoint with the reason."""
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise UnsupportedCheckpoint(f"{folder} holds no config.json: not a checkpoint in Hugging Face format")
    config = json.loads(config_file.read_text())
    architectures = config.get("architectures") or ["(none)"]
    for architecture in architectures:
        if architecture in LOADERS:
            return LOADERS[architecture](folder, config)
    raise UnsupportedCheckpoint(
        f"architecture {', '.join(architectures)} is not supported; supported: {', '.join(LOADERS)}"
    )
