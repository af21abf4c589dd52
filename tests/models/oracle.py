"""transformers as the oracle, and our decoder loaded from the same folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from services.text_engine.attention.torch_reference import TorchReferenceAttention
from services.text_engine.kernels import reference
from services.text_engine.models.load_config import load_model_config
from services.text_engine.models.weights import load_decoder
from tests.models.paged import PagedDecoder

CPU = torch.device("cpu")


def load_oracle(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    is_llava = load_model_config(folder).image_token_id is not None
    auto = AutoModelForImageTextToText if is_llava else AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None  # greedy runs are compared to their full length
    return model


def oracle_greedy(model: Any, num_new_tokens: int, **inputs: torch.Tensor) -> list[int]:
    prompt = inputs["input_ids"]
    inputs.setdefault("attention_mask", torch.ones_like(prompt))
    output = model.generate(**inputs, max_new_tokens=num_new_tokens, do_sample=False)
    tokens: list[int] = output[0, prompt.shape[1] :].tolist()
    return tokens


@torch.inference_mode()
def oracle_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """[num_tokens, vocab_size] fp32 for tokens [num_tokens]."""
    logits: torch.Tensor = model(input_ids=tokens[None]).logits[0].float()
    return logits


def load_ours(folder: Path, dtype: torch.dtype = torch.float32) -> PagedDecoder:
    attention = TorchReferenceAttention(dtype, CPU)
    config = load_model_config(folder)
    return PagedDecoder(load_decoder(folder, config, attention, reference, dtype=dtype, device=CPU), attention)


def prompt_tokens(length: int, seed: int = 0) -> torch.Tensor:
    """[length] token ids of the tiny tokenizer, special tokens left out."""
    return torch.randint(3, 316, (length,), generator=torch.Generator().manual_seed(seed))
