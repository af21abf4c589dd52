"""What operators ask of a text engine: about its KV cache, which can be put to sleep, and its LoRA adapters."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shared.wire.common import WireModel


class CacheState(WireModel):
    """The KV cache of one text engine.

    state       "falling asleep": running answers are finished first; "asleep": its memory is given back
    num_shared  blocks that several sequences hold
    num_image_blocks   published ones with image positions in them
    num_queried_tokens, num_hit_tokens   of prompts looked up in the prefix cache since the start, and found there
    num_host_slots, num_host_blocks, num_host_hits   room for evicted blocks in host memory, how many are there, and how
                many have come back
    num_idle_embedding_bytes   of images' embeddings kept although no request needs them now
    """

    state: Literal["awake", "falling asleep", "asleep"]
    prefix_caching: bool
    size_bytes: int
    block_size: int
    num_blocks: int
    num_free: int
    num_cached: int
    num_referenced: int
    num_shared: int
    num_image_blocks: int
    num_evictions: int
    num_queried_tokens: int
    num_hit_tokens: int
    hit_ratio: float
    num_host_slots: int = 0
    num_host_blocks: int = 0
    num_host_hits: int = 0
    num_idle_embedding_bytes: int


class SleepRequest(WireModel):
    """mode        wait: running answers are finished first; abort: they end with an error
    timeout_s   the longest wait; when it is over the engine stays awake
    """

    mode: Literal["wait", "abort"] = "wait"
    timeout_s: float = Field(default=60.0, gt=0, le=3600)


class LoadAdapterRequest(WireModel):
    """vLLM's names. lora_path: below the engine's lora_folder; load_inplace: one of this name may be replaced"""

    lora_name: str = Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")
    lora_path: str = Field(min_length=1, max_length=1000)
    load_inplace: bool = False


class UnloadAdapterRequest(WireModel):
    lora_name: str = Field(min_length=1, max_length=200)
