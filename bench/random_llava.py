"""A LLaVA-1.5 checkpoint without weights: config.json and a tokenizer, for `--load-format dummy`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel as ByteLevelSplit


@dataclass(frozen=True, slots=True)
class Shape:
    """The text model's shape; image_token_id is the first id past the text's."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    image_rows: int

    @property
    def image_token_id(self) -> int:
        return self.vocab_size - 64


VICUNA_7B = Shape(4096, 11008, 32, 32, 32, 32064, image_rows=576)
TINY = Shape(64, 96, 2, 4, 4, 384, image_rows=16)


def write_checkpoint(folder: Path, shape: Shape, *, max_positions: int = 4096) -> None:
    text = {
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
    }
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 336,
        "patch_size": 14,
    }
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": shape.image_token_id,
        "text_config": text,
        "vision_config": vision,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    symbols = sorted(ByteLevelSplit.alphabet())
    words = [f"w{i}" for i in range(shape.image_token_id - len(symbols))]
    tokenizer = Tokenizer(BPE({word: i for i, word in enumerate([*symbols, *words])}, []))
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
