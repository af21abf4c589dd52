"""Tile sizes and grid of the paged attention kernel, from what the host knows without asking the device.

Pure functions of shapes; docs/kernels.md has the reasons and the registers and shared memory that each choice costs.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_M = 16  # rows of the smallest tile that tensor cores multiply
MAX_GROUP = 128  # query heads that share a key head
MAX_BLOCK_D = 512
TILE_ELEMENTS = 8192  # of a tile of keys: 16 KiB of bf16, and as many of values


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How to launch one layer's attention.

    small_m          rows of a tile for sequences whose new tokens fit it: decode
    large_m          rows of a tile for all others; 0: they take small tiles too
    block_d, block_n         head dimensions and positions of a tile of keys
    target_programs          splits are made until about so many programs are busy; also bounds the partial results
    min_tiles_per_split, max_splits
    """

    small_m: int
    large_m: int
    block_d: int
    block_n: int
    num_warps: int
    num_stages: int
    target_programs: int
    min_tiles_per_split: int
    max_splits: int

    @property
    def partial_floats(self) -> int:
        """Of one program's partial result: its rows of weighted sums, and a maximum and a sum for each."""
        return max(self.small_m, self.large_m) * (self.block_d + 2)

    @property
    def workspace_floats(self) -> int:
        return self.target_programs * self.partial_floats

    def max_items(self, num_tokens: int, num_seqs: int, group: int, num_kv_heads: int) -> int:
        """No batch of so many tokens and sequences has more pieces of work for one key head, whatever its lengths.

        No tile is empty, each sequence has at most one that is not full, and the splits of split tiles are at most
        target_programs over all heads.
        """
        tokens_per_tile = max(self.small_m, self.large_m) // group
        num_tiles = min(num_tokens, num_seqs + num_tokens // tokens_per_tile)
        return num_tiles + self.target_programs // num_kv_heads


def plan_launch(
    *,
    group: int,
    num_kv_heads: int,
    head_dim: int,
    element_bytes: int,
    is_quantized: bool,
    is_decode: bool,
    num_multiprocessors: int,
    capability: int,
) -> LaunchPlan:
    """The plan for one shape of attention on one chip.

    group          query heads per key head
    element_bytes  of the model's numbers
    is_quantized   the cache holds bytes
    is_decode      the batch has about one new token a sequence
    capability     80, 90, ...
    """
    if group > MAX_GROUP:
        raise ValueError(f"attention takes up to {MAX_GROUP} query heads for one key head, not {group}")
    block_d = max(16, next_power_of_2(head_dim))
    if block_d > MAX_BLOCK_D:
        raise ValueError(f"attention takes heads of up to {MAX_BLOCK_D} dimensions, not {head_dim}")
    # Hopper and Blackwell in data centres. A block on the others, 12.0 among them, has 99 KiB.
    is_large = 90 <= capability < 120
    if is_decode:
        small_m, large_m = max(MIN_M, next_power_of_2(group)), 0
        block_n, num_warps = within(16, TILE_ELEMENTS // block_d, 128), 4
        num_stages = 4 if is_quantized else 3
        programs_per_multiprocessor, min_tiles_per_split = 3, 2
    else:
        small_m, large_m = MIN_M, 128 if is_large else 64
        block_n = within(16, TILE_ELEMENTS // block_d // (1 if is_large else 2), 64)
        num_warps = 8 if is_large or block_d > 128 else 4
        num_stages = 3
        programs_per_multiprocessor, min_tiles_per_split = (1 if is_large else 2), 4
    if group > MIN_M:
        small_m, large_m = max(small_m, large_m, 64, next_power_of_2(group)), 0
    if element_bytes > 2:
        block_n, num_stages = max(16, block_n // 2), 2
    return LaunchPlan(
        small_m=small_m,
        large_m=large_m,
        block_d=block_d,
        block_n=block_n,
        num_warps=num_warps,
        num_stages=num_stages,
        target_programs=max(num_multiprocessors * programs_per_multiprocessor, num_kv_heads),
        min_tiles_per_split=min_tiles_per_split,
        max_splits=within(16, TILE_ELEMENTS // block_d, 64),
    )


def within(low: int, value: int, high: int) -> int:
    return min(max(low, value), high)


def next_power_of_2(value: int) -> int:
    return 1 << (value - 1).bit_length()
