"""Launches attention over the paged KV cache: checks, grid, workspace. The kernel: `paged_attention_kernel`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from services.text_engine.kernels.compile_check import CompileCase
from services.text_engine.kernels.kv_layout import KVFormat, KVLayout
from services.text_engine.kernels.launch_plan import LaunchPlan, next_power_of_2, plan_launch
from services.text_engine.kernels.paged_attention_kernel import paged_attention_kernel

HARDWARE_FP8 = 89  # the first compute capability that converts e4m3
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory for split tiles, shared by all layers: their launches follow one another.

    partials  [at least plan.workspace_floats] fp32
    arrivals  [at least plan.target_programs] int32, zero between launches
    """

    partials: torch.Tensor
    arrivals: torch.Tensor


def allocate_workspace(plans: list[LaunchPlan], device: torch.device) -> Workspace:
    """Enough for any of the plans."""
    num_floats = max((plan.workspace_floats for plan in plans), default=0)
    num_programs = max((plan.target_programs for plan in plans), default=0)
    return Workspace(
        torch.empty(num_floats, dtype=torch.float32, device=device),
        torch.zeros(num_programs, dtype=torch.int32, device=device),
    )


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    image_spans: torch.Tensor | None,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    layout: KVLayout,
    plan: LaunchPlan,
    max_num_seqs: int,
    fp8_in_software: bool,
    workspace: Workspace,
) -> torch.Tensor:
    """Attention of every new token over its own sequence, whose keys and values the cache holds already.

    query         [num_tokens, num_heads, head_dim], rotated
    kv_cache      as `layout.allocate` makes it
    cu_seqlens_q  [num_seqs + 1] int32, seq_lens [num_seqs] int32, block_tables [num_seqs, max_blocks] int32, and
    image_spans   [num_tokens, 2] int32 or None: see `AttentionMetadata`. Rows of no sequence are not written
    returns       [num_tokens, num_heads * head_dim] in query's dtype
    """
    num_tokens, num_heads, head_dim = query.shape
    num_seqs = seq_lens.shape[0]
    num_kv_heads = layout.num_kv_heads
    group = num_heads // num_kv_heads
    layout.check(kv_cache)
    assert query.dtype == layout.dtype
    assert head_dim == layout.head_dim
    assert num_heads == group * num_kv_heads
    assert query.stride(2) == 1
    assert query.data_ptr() % 16 == 0
    assert cu_seqlens_q.dtype == seq_lens.dtype == block_tables.dtype == torch.int32
    assert cu_seqlens_q.shape == (num_seqs + 1,)
    assert cu_seqlens_q.is_contiguous()
    assert seq_lens.is_contiguous()
    assert block_tables.shape[0] == num_seqs <= max_num_seqs
    assert block_tables.stride(1) == 1
    assert plan.block_n % layout.block_size == 0
    assert scale > 0
    assert workspace.partials.numel() >= plan.workspace_floats
    assert workspace.arrivals.numel() >= plan.target_programs
    if image_spans is not None:
        assert image_spans.shape == (num_tokens, 2)
        assert image_spans.dtype == torch.int32
        assert image_spans.is_contiguous()

    output = torch.empty((num_tokens, num_heads * head_dim), dtype=query.dtype, device=query.device)
    # What a stored element stands for, as a share of its row's largest magnitude.
    unit = (256.0 if fp8_in_software else 1.0) / layout.largest
    score_scale = scale * LOG2_E * unit
    grid = (num_kv_heads, plan.max_items(num_tokens, num_seqs, group, num_kv_heads))
    paged_attention_kernel[grid](
        output,
        query,
        kv_cache,
        layout.scales(kv_cache),
        cu_seqlens_q,
        seq_lens,
        block_tables,
        cu_seqlens_q if image_spans is None else image_spans,
        workspace.partials,
        workspace.arrivals,
        num_seqs,
        query.stride(0),
        query.stride(1),
        block_tables.stride(0),
        score_scale if soft_cap is None else 2.0 * score_scale / soft_cap,
        0.0 if soft_cap is None else soft_cap * LOG2_E,
        unit,
        sliding_window or 0,
        **constexprs(layout, plan, group, max_num_seqs, fp8_in_software),
        HAS_WINDOW=sliding_window is not None,
        HAS_SOFT_CAP=soft_cap is not None,
        HAS_SPANS=image_spans is not None,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    return output


def constexprs(
    layout: KVLayout, plan: LaunchPlan, group: int, max_num_seqs: int, fp8_in_software: bool
) -> dict[str, int | bool]:
    """What the kernel is compiled for: constant for a model, but for the plan."""
    return {
        "GROUP": group,
        "NUM_KV_HEADS": layout.num_kv_heads,
        "HEAD_DIM": layout.head_dim,
        "SMALL_M": plan.small_m,
        "LARGE_M": plan.large_m,
        "BLOCK_D": plan.block_d,
        "BLOCK_N": plan.block_n,
        "BLOCK_SIZE": layout.block_size,
        "ROW_STRIDE": layout.row_stride,
        "HEAD_STRIDE": layout.head_stride,
        "SCALES_OFFSET": layout.scales_offset,
        "MAX_SEQS": next_power_of_2(max_num_seqs),
        "TARGET_PROGRAMS": plan.target_programs,
        "MIN_TILES_PER_SPLIT": plan.min_tiles_per_split,
        "MAX_SPLITS": plan.max_splits,
        "PARTIAL_STRIDE": plan.partial_floats,
        "IS_QUANTIZED": layout.is_quantized,
        "IS_FP8": layout.format == "fp8",
        "FP8_IN_SOFTWARE": fp8_in_software,
    }


@dataclass(frozen=True, slots=True)
class _Model:
    """What `compile_cases` compiles for.

    features   of "window", "soft_cap", "spans"
    has_mixed  the mixed plan too: it takes ten times as long to compile, so once for each head_dim and format
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    format: KVFormat = "auto"
    features: frozenset[str] = frozenset()
    has_mixed: bool = False


_MODELS = (
    _Model("Llama-3-8B bf16", 32, 8, 128, has_mixed=True),
    _Model("Llama-3-8B bf16, fp8 cache", 32, 8, 128, format="fp8", has_mixed=True),
    _Model("Llama-3-8B bf16, int8 cache", 32, 8, 128, format="int8"),
    _Model("Vicuna-7B fp16", 32, 32, 128, torch.float16),
    _Model("Vicuna-7B fp16, fp8 cache", 32, 32, 128, torch.float16, format="fp8"),
    _Model("Qwen2.5-7B bf16", 28, 4, 128),
    _Model("SmolLM2-135M bf16", 9, 3, 64, has_mixed=True),
    _Model("Phi-2 fp16", 32, 32, 80, torch.float16),
    _Model("Phi-3-mini bf16, window", 32, 32, 96, features=frozenset({"window"})),
    _Model("Gemma-2-9B bf16, window, soft cap", 16, 8, 256, features=frozenset({"window", "soft_cap"})),
    _Model("Gemma-3-12B bf16, window, spans", 16, 8, 256, features=frozenset({"window", "spans"}), has_mixed=True),
    _Model("Gemma-3-12B bf16, fp8 cache", 16, 8, 256, format="fp8"),
)


def compile_cases() -> list[CompileCase]:
    """Decode and mixed plans of well-known models, on the chips that the plans are for."""
    return [
        _compile_case(model, is_decode=is_decode, capability=capability)
        for model in _MODELS
        for is_decode in ((True, False) if model.has_mixed else (True,))
        for capability in (80, 90, 100)
    ]


def _compile_case(model: _Model, *, is_decode: bool, capability: int) -> CompileCase:
    layout = KVLayout(model.num_kv_heads, model.head_dim, 16, model.dtype, model.format)
    group = model.num_heads // model.num_kv_heads
    plan = plan_launch(
        group=group,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        element_bytes=model.dtype.itemsize,
        is_quantized=layout.is_quantized,
        is_decode=is_decode,
        num_multiprocessors={80: 108, 90: 132, 100: 148}[capability],
        capability=capability,
    )
    in_software = model.format == "fp8" and capability < HARDWARE_FP8
    values = constexprs(layout, plan, group, max_num_seqs=256, fp8_in_software=in_software) | {
        "HAS_WINDOW": "window" in model.features,
        "HAS_SOFT_CAP": "soft_cap" in model.features,
        "HAS_SPANS": "spans" in model.features,
    }
    names = paged_attention_kernel.arg_names
    element = {torch.bfloat16: "bf16", torch.float16: "fp16"}[model.dtype]
    types = {"output_ptr": f"*{element}", "query_ptr": f"*{element}", "partials_ptr": "*fp32"}
    types |= (
        {"kv_ptr": "*u8", "scales_ptr": "*fp32"}
        if layout.is_quantized
        else dict.fromkeys(("kv_ptr", "scales_ptr"), f"*{element}")
    )
    types |= dict.fromkeys(("score_scale", "soft_cap", "unit"), "fp32") | dict.fromkeys(values, "constexpr")
    pointers = {name for name in names if name.endswith("_ptr")}
    unaligned = {"cu_seqlens_q_ptr", "seq_lens_ptr", "block_tables_ptr", "image_spans_ptr"}
    return CompileCase(
        name=f"paged_attention {'decode' if is_decode else 'mixed'}, {model.name}",
        kernel=paged_attention_kernel,
        signature={name: types.get(name, "*i32" if name in pointers else "i32") for name in names},
        constexprs=values,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        # A prompt's tile of 256 dimensions fills the registers; what it spills lies outside of its loops.
        is_hot=is_decode or model.head_dim <= 128,
        ptx_contains=tuple(_wanted_instructions(is_decode, capability)),
        divisible_by_16=frozenset(pointers - unaligned | {"query_token_stride", "query_head_stride"}),
        archs=(capability,),
    )


def _wanted_instructions(is_decode: bool, capability: int) -> Iterator[str]:
    yield "cp.async"
    yield "mma.sync"
    if not is_decode and capability >= 90:
        yield {90: "wgmma.mma_async", 100: "tcgen05.mma"}[capability]
