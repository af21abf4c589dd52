"""`ModelConfig` for checkpoints that transformers' own code runs: what of its config the engine needs to know.

Refuses, by the name of the field, what the paged cache cannot hold: a state that is no keys and values, attention that
is not causal, an encoder, pictures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from services.text_engine.models.config import ConfigError, Fields, ModelConfig, RopeConfig

KNOWN_LAYERS: Final = frozenset({"full_attention", "sliding_attention"})
# Fields that, if they say anything, mean what a paged cache of keys and values is not enough for.
REFUSED: Final = {
    "is_encoder_decoder": "a model with an encoder of its own is not supported",
    "audio_config": "sound is not supported",
    "attention_chunk_size": "attention in chunks is not supported",
    "quantization_config": "only plain weights are supported on this path",
}


def read_transformers_config(folder: Path, fields: Fields, supported: str) -> ModelConfig:
    """The facts about a checkpoint that none of our families describes. Fields that only `decoder` reads have values
    that mean nothing.

    supported  our families, for messages
    Raises ConfigError without the package transformers, and for a model that cannot be served through it.
    """
    if fields.raw("vision_config"):
        raise fields.error("architectures", f"with pictures these are supported: {supported}")
    for name, wanted in REFUSED.items():
        if fields.raw(name):
            raise fields.error(name, wanted)
    config = _auto_config(folder, fields, supported)
    if unknown := sorted(set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYERS):
        raise ConfigError(
            f"{fields.name('layer_types')} has {', '.join(unknown)}; only layers of attention over keys and values are "
            "supported"
        )
    num_heads = int(config.num_attention_heads)
    hidden_size = int(config.hidden_size)
    num_layers = int(config.num_hidden_layers)
    dtype = config.dtype
    return ModelConfig(
        implementation="transformers",
        hidden_size=hidden_size,
        intermediate_size=int(getattr(config, "intermediate_size", None) or 4 * hidden_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or num_heads),
        head_dim=int(getattr(config, "head_dim", None) or hidden_size // num_heads),
        vocab_size=int(config.vocab_size),
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=10_000.0),
        max_position_embeddings=_max_positions(config, fields),
        tie_word_embeddings=bool(config.tie_word_embeddings),
        sliding_windows=(None,) * num_layers,
        eos_token_ids=fields.token_ids("eos_token_id"),
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
    )


def _auto_config(folder: Path, fields: Fields, supported: str) -> Any:
    architecture = next(iter(fields.strings("architectures")), "")
    try:  # the engine itself runs without it
        import transformers
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ModuleNotFoundError:
        raise fields.error(
            "architectures", f"supported: {supported}; others need the package transformers (pip install transformers)"
        ) from None
    classes = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    if architecture not in classes:
        raise fields.error("architectures", f"supported: {supported}, and text models that transformers knows")
    if not getattr(getattr(transformers, architecture), "_supports_attention_backend", False):
        raise fields.error(
            "architectures",
            "its code in transformers takes no other attention, so it cannot run over the engine's cache",
        )
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # its own validation raises many kinds
        raise ConfigError(f"{folder}: transformers cannot read config.json: {error}") from error


def _max_positions(config: Any, fields: Fields) -> int:
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        raise fields.error("max_position_embeddings", "this model needs it")
    rope = getattr(config, "rope_parameters", None) or {}
    # Beyond its first length LongRoPE turns every key by other angles, those in the cache included.
    if rope.get("rope_type") == "longrope":
        original = rope.get("original_max_position_embeddings")
        original = original or getattr(config, "original_max_position_embeddings", None)
        return min(limit, int(original or limit))
    return limit
