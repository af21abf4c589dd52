"""Attention on a GPU: two Triton launches a layer, `store_kv` and `paged_attention`. The cache's order: `kv_layout`.

Nothing here waits for the device or asks it anything, so that a call can be captured in a CUDA graph: grids depend on
the shapes of the batch's tensors alone. Works on CPU tensors too where Triton runs in its interpreter, which is how it
is tested.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.text_engine.attention.interface import AttentionMetadata, AttentionShape
from services.text_engine.kernels.kv_layout import KVFormat, KVLayout
from services.text_engine.kernels.launch_plan import LaunchPlan, plan_launch
from services.text_engine.kernels.paged_attention import HARDWARE_FP8, allocate_workspace, paged_attention
from services.text_engine.kernels.store_kv import store_kv

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class TritonAttention:
    """Satisfies `AttentionBackend`.

    max_num_seqs     of any batch: the kernel counts through all of them
    kv_cache_format  "auto": the model's dtype; "fp8", "int8": bytes, with a scale for each head of each token
    """

    kv_block_dim = 0

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_num_seqs: int,
        kv_cache_format: KVFormat = "auto",
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"Triton attention works in {', '.join(map(str, DTYPES))}, not in {dtype}")
        self._dtype = dtype
        self._device = device
        self._max_num_seqs = max_num_seqs
        self._kv_cache_format: KVFormat = kv_cache_format
        self._num_multiprocessors, self._capability = 1, 90
        if device.type == "cuda":
            self._num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
            major, minor = torch.cuda.get_device_capability(device)
            self._capability = 10 * major + minor
        # Chosen when a cache is allocated, so that `attend` only looks them up.
        self._layouts: dict[AttentionShape, KVLayout] = {}
        self._plans: dict[AttentionShape, _Plans] = {}
        self._workspace = allocate_workspace([], device)

    def allocate_kv_cache(self, num_blocks: int, block_size: int, shape: AttentionShape) -> torch.Tensor:
        """[num_blocks, num_kv_heads, elements of one head's block]: see `kv_layout`."""
        layout = KVLayout(shape.num_kv_heads, shape.head_dim, block_size, self._dtype, self._kv_cache_format)
        assert self._layouts.setdefault(shape, layout) == layout, "all caches of one shape have blocks of one size"
        if shape not in self._plans:
            self._plans[shape] = _Plans(self._plan(shape, is_decode=True), self._plan(shape, is_decode=False))
            plans = [plan for pair in self._plans.values() for plan in (pair.decode, pair.mixed)]
            self._workspace = allocate_workspace(plans, self._device)
        return layout.allocate(num_blocks, self._device)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos_sin: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        shape: AttentionShape,
    ) -> torch.Tensor:
        """Rotates query in place."""
        layout = self._layouts[shape]
        store_kv(query, key, value, cos_sin, kv_cache, metadata.slot_mapping, layout)
        is_decode = query.shape[0] <= metadata.seq_lens.shape[0]
        plans = self._plans[shape]
        return paged_attention(
            query,
            kv_cache,
            metadata.cu_seqlens_q,
            metadata.seq_lens,
            metadata.block_tables,
            metadata.image_spans,
            scale=shape.scale,
            sliding_window=shape.sliding_window,
            soft_cap=shape.soft_cap,
            layout=layout,
            plan=plans.decode if is_decode else plans.mixed,
            max_num_seqs=self._max_num_seqs,
            fp8_in_software=self._kv_cache_format == "fp8" and self._capability < HARDWARE_FP8,
            workspace=self._workspace,
        )

    def _plan(self, shape: AttentionShape, *, is_decode: bool) -> LaunchPlan:
        return plan_launch(
            group=shape.num_heads // shape.num_kv_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            element_bytes=self._dtype.itemsize,
            is_quantized=self._kv_cache_format != "auto",
            is_decode=is_decode,
            num_multiprocessors=self._num_multiprocessors,
            capability=self._capability,
        )


@dataclass(frozen=True, slots=True)
class _Plans:
    """decode: for a batch of about one token a sequence; mixed: for any other."""

    decode: LaunchPlan
    mixed: LaunchPlan
