"""How many KV blocks fit, and a clear word when they are too few."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.text_engine.preflight import check_max_model_len
from shared.resources import available_memory_bytes
from shared.sizes import format_size, parse_size

BLOCK_SIZE = 16
CPU_SHARE = 0.25  # of the available memory, if nobody says otherwise: the encoder and the page cache need the rest
CPU_MAX_BYTES = 2 << 30


class KVCacheTooSmall(ValueError):
    """The configuration cannot serve even one request of the promised length."""


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    """num_blocks blocks of BLOCK_SIZE tokens; a sequence may have up to max_model_len tokens."""

    num_blocks: int
    bytes_per_block: int
    max_model_len: int

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * BLOCK_SIZE

    @property
    def size_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block


def memory_budget(device: torch.device, kv_cache_memory: str | None, gpu_memory_utilization: float) -> int:
    """Bytes for the KV cache: as told, else what the device has left after the weights."""
    if kv_cache_memory is not None:
        return parse_size(kv_cache_memory)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading has left over counts as free
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(total * gpu_memory_utilization) - (total - free))
    available = available_memory_bytes()
    return CPU_MAX_BYTES if available is None else min(CPU_MAX_BYTES, int(available * CPU_SHARE))


def plan_kv_cache(
    *,
    budget_bytes: int,
    bytes_per_block: int,
    model_max_len: int,
    max_model_len: int | None,
    max_num_seqs: int,
) -> KVCachePlan:
    """Fill the budget, but never with more than every running sequence at full length could use.

    model_max_len   what the model's positions allow; a smaller cache lowers the limit silently only if max_model_len
                    was not asked for
    Raises SettingRefused for a longer one than that, KVCacheTooSmall.
    """
    check_max_model_len(max_model_len, model_max_len)
    wanted_len = max_model_len or model_max_len
    useful_blocks = max_num_seqs * -(-wanted_len // BLOCK_SIZE)
    num_blocks = min(budget_bytes // bytes_per_block, useful_blocks)
    num_tokens = num_blocks * BLOCK_SIZE
    if num_blocks < 1 or (max_model_len is not None and num_tokens < max_model_len):
        needed = -(-(max_model_len or 1) // BLOCK_SIZE) * bytes_per_block
        raise KVCacheTooSmall(
            f"the KV cache has room for {num_tokens} tokens ({format_size(budget_bytes)}), but max_model_len needs "
            f"{max_model_len or BLOCK_SIZE} ({format_size(needed)}): raise --kv-cache-memory (or "
            "--gpu-memory-utilization) or lower --max-model-len"
        )
    return KVCachePlan(num_blocks, bytes_per_block, min(wanted_len, num_tokens))
