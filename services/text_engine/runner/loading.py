"""One rank's model, ready to run: device, kernels, weights, KV cache. Every rank of an engine loads by this."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from services.text_engine.attention.cpu_backend import CpuAttention
from services.text_engine.attention.interface import AttentionBackend
from services.text_engine.attention.torch_reference import TorchReferenceAttention
from services.text_engine.config import TextEngineSettings
from services.text_engine.core.speculation.draft_choice import MAX_GUESSING_ROWS
from services.text_engine.kernels import reference
from services.text_engine.kernels.grouped_weight import GroupedWeight
from services.text_engine.kernels.interface import Kernels
from services.text_engine.kernels.kv_layout import KVFormat
from services.text_engine.kernels.native import NativeKernels
from services.text_engine.kernels.native_library import load_native
from services.text_engine.kernels.native_matmul import WIDENED_DTYPES, PackedLinear, packing_pays
from services.text_engine.kernels.native_quantized import NativeQuantizedLinear, UnpackingLinear
from services.text_engine.kernels.quant_layout import from_grouped
from services.text_engine.machine_preflight import check_host_cache, check_kernels, check_num_gpus, uses_triton
from services.text_engine.models.config import ModelConfig
from services.text_engine.models.interface import CausalModel
from services.text_engine.models.layers import Linear, MakeProduct, MakeQuantizedProduct, Product
from services.text_engine.models.load_config import load_model_config
from services.text_engine.models.lora.adapted import LoadedAdapters
from services.text_engine.models.quantization.on_the_fly import quantizer
from services.text_engine.models.sharding import Shard
from services.text_engine.models.transformers_decoder import load_transformers_decoder
from services.text_engine.models.weights import load_decoder, random_decoder
from services.text_engine.runner.cuda_graphs import graph_memory_bytes, graph_sizes
from services.text_engine.runner.device_sampling import DrawTokens
from services.text_engine.runner.draft_model import DraftDecoder
from services.text_engine.runner.forward_pass import ForwardPass
from services.text_engine.runner.host_tier import HostTier
from services.text_engine.runner.image_inputs import MergeRows
from services.text_engine.runner.kv_cache import BLOCK_SIZE, KVCachePlan, memory_budget, plan_kv_cache
from services.text_engine.runner.lora_modules import AdaptedModel, adapters_of_rank, read_lora_modules
from services.text_engine.runner.tensor_parallel import ProcessRanks
from shared.cuda_capture import CudaCapture
from shared.device import choose_device, choose_dtype
from shared.log import get_logger
from shared.resources import default_threads
from shared.settings_errors import SettingRefused
from shared.sizes import format_size, parse_size
from shared.torch_io import dtype_name
from shared.torch_threads import compute_with

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """What differs between devices.

    matrix_dtypes  what weight matrices may stay in, besides the model's dtype, if the checkpoint has them so
    merge_rows     puts image rows among the others'; None: as `image_inputs` does by itself
    draw_tokens    samples on the device; None: as `sampler` does by itself
    """

    attention: AttentionBackend
    kernels: Kernels
    make_product: MakeProduct = Linear
    make_quantized: MakeQuantizedProduct = UnpackingLinear
    matrix_dtypes: frozenset[torch.dtype] = frozenset()
    merge_rows: MergeRows | None = None
    draw_tokens: DrawTokens | None = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What one rank holds.

    allocate_kv_caches  makes what `forward_pass` has one of already
    parts               the kernels for its device
    host_tier           where evicted blocks are copied to, if anywhere
    adapted             what it needs for LoRA adapters, if it may have any
    draft               the weights of the model that guesses for it, if there is one
    """

    decoder: CausalModel
    allocate_kv_caches: Callable[[], list[torch.Tensor]]
    plan: KVCachePlan
    forward_pass: ForwardPass
    parts: DeviceParts
    dtype: torch.dtype
    device: torch.device
    host_tier: HostTier | None = None
    adapted: AdaptedModel | None = None
    draft: DraftDecoder | None = None


def rank_device(settings: TextEngineSettings, index: int) -> torch.device:
    """The device of one rank. Raises ValueError if there are too few."""
    device = choose_device(settings.device)
    size = settings.tensor_parallel_size
    if device.type != "cuda" or size == 1:
        return device
    check_num_gpus(settings, torch.cuda.device_count())
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def load_model(
    settings: TextEngineSettings, config: ModelConfig, device: torch.device, ranks: ProcessRanks | None = None
) -> LoadedModel:
    """Load this rank's part of the checkpoint and make room for its KV cache; a collective where there are ranks.

    config  the whole model's
    Raises ValueError or OSError subclasses whose message says which setting or file is wrong.
    """
    check_host_cache(settings, device.type)
    _set_threads(settings.num_threads, 1 if ranks is None else ranks.size)
    dtype = choose_dtype(settings.dtype, device)
    parts = choose_parts(settings, device, dtype)
    log.info(
        "loading model",
        model=settings.served_model_name or settings.model.name,
        dtype=dtype_name(dtype),
        device=str(device),
        threads=torch.get_num_threads(),
    )
    shard = None if ranks is None else Shard(ranks.index, ranks.size)
    adapters = adapters_of_rank(settings, config, parts.make_product, dtype, device, shard)
    first = read_lora_modules(settings, config)
    is_ours = config.implementation == "native"
    load = partial(_load, adapters=adapters) if is_ours else _load_by_transformers
    decoder = load(settings, config, parts, dtype, device, ranks)
    for number, files in enumerate(first, start=1):
        assert adapters is not None
        adapters.put(number, files)
    uses_graphs = _can_use_graphs(settings, config, device)
    reserved = graph_memory_bytes(decoder.config, _max_graph_tokens(settings), dtype) if uses_graphs else 0
    if adapters is not None and settings.lora_folder is not None:
        reserved += (settings.max_loras - len(first)) * adapters.bytes_of(settings.max_lora_rank)
    draft = _load_draft(settings, dtype, device)
    reserved += 0 if draft is None else draft.graph_bytes
    plan = _plan(settings, decoder, parts.attention, device, ranks, reserved, draft)
    log.info(
        "KV cache",
        blocks=plan.num_blocks,
        tokens=plan.num_tokens,
        mib=plan.size_bytes >> 20,
        max_model_len=plan.max_model_len,
    )
    if draft is not None:
        log.info("KV cache of the draft model, beside it", mib=plan.num_blocks * draft.bytes_per_block >> 20)
    attention = parts.attention

    def allocate_kv_caches() -> list[torch.Tensor]:
        shapes = decoder.attention_shapes
        return [attention.allocate_kv_cache(plan.num_blocks, BLOCK_SIZE, shape) for shape in shapes]

    kv_caches = allocate_kv_caches()
    tier = _host_tier(settings, kv_caches, attention.kv_block_dim, plan.bytes_per_block, device)
    forward_pass = ForwardPass(
        decoder, kv_caches, device, block_dim=attention.kv_block_dim, adapters=adapters, host_tier=tier
    )
    if uses_graphs:
        sizes = graph_sizes(_max_graph_tokens(settings))
        forward_pass.capture(CudaCapture(device), sizes, max_blocks=-(-plan.max_model_len // BLOCK_SIZE))
    adapted = None if adapters is None else AdaptedModel(config, adapters, [files.identity for files in first])
    return LoadedModel(decoder, allocate_kv_caches, plan, forward_pass, parts, dtype, device, tier, adapted, draft)


def _load_draft(settings: TextEngineSettings, dtype: torch.dtype, device: torch.device) -> DraftDecoder | None:
    """The model that guesses, as the target is loaded, with attention and kernels of its own."""
    if settings.speculative_model is None:
        return None
    log.info("loading draft model", folder=str(settings.speculative_model))
    settings = settings.model_copy(update={"model": settings.speculative_model})
    config = load_model_config(settings.model, settings.model_implementation)
    parts = choose_parts(settings, device, dtype)
    load = partial(_load, adapters=None) if config.implementation == "native" else _load_by_transformers
    decoder = load(settings, config, parts, dtype, device, None)
    max_graph_rows = min(MAX_GUESSING_ROWS, settings.max_num_seqs) if _can_use_graphs(settings, config, device) else 0
    return DraftDecoder(decoder, parts.attention, dtype, max_graph_rows)


def _load(
    settings: TextEngineSettings,
    config: ModelConfig,
    parts: DeviceParts,
    dtype: torch.dtype,
    device: torch.device,
    ranks: ProcessRanks | None,
    adapters: LoadedAdapters | None,
) -> CausalModel:
    load = random_decoder if settings.load_format == "dummy" else partial(load_decoder, settings.model)
    return load(
        config,
        parts.attention,
        parts.kernels,
        dtype=dtype,
        device=device,
        make_product=parts.make_product,
        make_quantized=parts.make_quantized,
        quantize=None if settings.quantization is None else quantizer(settings.quantization, device),
        matrix_dtypes=parts.matrix_dtypes,
        ranks=ranks,
        adapt=None if adapters is None else adapters.adapt,
    )


def _load_by_transformers(
    settings: TextEngineSettings,
    config: ModelConfig,
    parts: DeviceParts,
    dtype: torch.dtype,
    device: torch.device,
    ranks: ProcessRanks | None,
) -> CausalModel:
    refused = {
        "tensor_parallel_size": ranks is not None,
        "quantization": settings.quantization is not None,
        "batch_invariant": settings.batch_invariant,
    }
    if names := [name for name, is_set in refused.items() if is_set]:
        raise ValueError(
            f"{config.architecture} is served by transformers' own code, which does not work with {', '.join(names)}"
        )
    log.warning("served by transformers' own code: slower than a native family", architecture=config.architecture)
    return load_transformers_decoder(
        settings.model,
        config,
        parts.attention,
        dtype=dtype,
        device=device,
        block_size=BLOCK_SIZE,
        random_weights=settings.load_format == "dummy",
    )


def _can_use_graphs(settings: TextEngineSettings, config: ModelConfig, device: torch.device) -> bool:
    """Not for mixtures of experts: how many rows an expert gets differs from step to step."""
    is_ours = config.implementation == "native" and config.moe is None
    wants = settings.attention_backend != "reference" and not settings.enforce_eager
    if device.type == "cuda" and wants and not is_ours:
        log.info("no CUDA graphs for this model", architecture=config.architecture)
    return device.type == "cuda" and wants and is_ours


def _host_tier(
    settings: TextEngineSettings,
    kv_caches: list[torch.Tensor],
    block_dim: int,
    bytes_per_block: int,
    device: torch.device,
) -> HostTier | None:
    if settings.host_cache_memory is None:
        return None
    num_slots = parse_size(settings.host_cache_memory) // bytes_per_block
    if num_slots < 1:
        raise SettingRefused(
            "host_cache_memory",
            settings.host_cache_memory,
            f"is too small; one block takes {format_size(bytes_per_block)}",
        )
    log.info("host memory for evicted blocks", blocks=num_slots, mib=num_slots * bytes_per_block >> 20)
    return HostTier(kv_caches, block_dim, num_slots)


def _max_graph_tokens(settings: TextEngineSettings) -> int:
    """Of a step that runs as a graph: every sequence's next token, or one sequence's with a draft."""
    num_draft_tokens = 0 if settings.speculative == "off" else settings.num_speculative_tokens
    return max(settings.max_num_seqs, 1 + num_draft_tokens)


def _set_threads(num_threads: int | None, num_ranks: int) -> None:
    """The model's threads; ranks on one CPU share them."""
    of_all_ranks = num_threads or default_threads()
    compute_with(max(1, of_all_ranks // num_ranks))


def choose_parts(settings: TextEngineSettings, device: torch.device, dtype: torch.dtype) -> DeviceParts:
    """Triton's kernels on a GPU, the compiled ones on a CPU where they exist and are wanted, else plain PyTorch."""
    check_kernels(settings, device.type)
    if settings.batch_invariant:
        _check_can_be_invariant(dtype)
    if uses_triton(settings, device.type):
        return _triton_parts(settings, device, dtype)
    kv_cache_format = _plain_cache_format(settings, dtype)
    wants_native = settings.attention_backend != "reference" and not settings.enforce_eager
    library = load_native() if device.type == "cpu" and wants_native else None
    if library is not None and dtype in (torch.bfloat16, torch.float32):
        packs = settings.batch_invariant or packing_pays(library, dtype)
        return DeviceParts(
            CpuAttention(library, dtype, kv_cache_format=kv_cache_format),
            NativeKernels(library),
            make_product=partial(PackedLinear, library, dtype=dtype) if packs else Linear,
            make_quantized=partial(NativeQuantizedLinear, library),
            matrix_dtypes=frozenset(WIDENED_DTYPES if packs and dtype == torch.float32 else ()),
        )
    if settings.attention_backend == "cpu":
        raise SettingRefused(
            "attention_backend",
            "cpu",
            f"needs compiled kernels that cannot be used here (device {device}, dtype {dtype_name(dtype)}); use auto "
            "or reference",
        )
    return DeviceParts(TorchReferenceAttention(dtype, device, kv_cache_format=kv_cache_format), reference)


def _plain_cache_format(settings: TextEngineSettings, dtype: torch.dtype) -> KVFormat:
    """Without the Triton kernels. A model that computes in fp32 for want of bf16 arithmetic keeps keys and values in
    bf16 all the same: attention's decoding is reading them, and half as much takes half the time."""
    assert settings.kv_cache_dtype != "fp8", "refused by check_kernels"
    if settings.kv_cache_dtype == "auto" and settings.dtype == "auto" and dtype == torch.float32:
        return "bfloat16"
    return settings.kv_cache_dtype


def _check_can_be_invariant(dtype: torch.dtype) -> None:
    """Raises SettingRefused where products or attention are somebody else's, who promises nothing of the kind."""
    if load_native() is None:
        raise SettingRefused("batch_invariant", True, "needs the compiled CPU kernels, which cannot be used here")
    if dtype not in (torch.bfloat16, torch.float32):
        raise SettingRefused("batch_invariant", True, f"works in bfloat16 and float32, not in {dtype_name(dtype)}")


def _triton_parts(settings: TextEngineSettings, device: torch.device, dtype: torch.dtype) -> DeviceParts:
    try:  # torch's builds for CPUs come without it
        from services.text_engine.attention.triton_backend import TritonAttention
        from services.text_engine.kernels.merge_rows import merge_rows
        from services.text_engine.kernels.quant_matmul import QuantLinear, make_arrivals
        from services.text_engine.kernels.sample import sample
        from services.text_engine.kernels.triton_kernels import TritonKernels
    except ModuleNotFoundError as error:
        raise ValueError(f"on a GPU the engine needs the package triton ({error}); or use 'reference'") from error
    kv_cache_format = settings.kv_cache_dtype
    if kv_cache_format == "bfloat16":
        if dtype != torch.bfloat16:
            raise SettingRefused(
                "kv_cache_dtype",
                "bfloat16",
                f"goes with dtype bfloat16 on GPUs, not with {dtype_name(dtype)}; use auto",
            )
        kv_cache_format = "auto"
    max_num_seqs = _max_graph_tokens(settings)
    attention = TritonAttention(dtype, device, max_num_seqs=max_num_seqs, kv_cache_format=kv_cache_format)
    arrivals = make_arrivals(device)

    def make_quantized(weight: GroupedWeight, bias: torch.Tensor | None) -> Product:
        return QuantLinear(from_grouped(weight), bias, arrivals)

    return DeviceParts(
        attention, TritonKernels(), make_quantized=make_quantized, merge_rows=merge_rows, draw_tokens=sample
    )


def _plan(
    settings: TextEngineSettings,
    decoder: CausalModel,
    attention: AttentionBackend,
    device: torch.device,
    ranks: ProcessRanks | None,
    reserved_bytes: int,
    draft: DraftDecoder | None,
) -> KVCachePlan:
    """The same on every rank: a block has its share on each, so the rank with the least room decides. A draft model's
    cache has as many blocks."""
    shapes = decoder.attention_shapes
    bytes_per_block = sum(attention.allocate_kv_cache(1, BLOCK_SIZE, shape).nbytes for shape in shapes)
    budget = memory_budget(device, settings.kv_cache_memory, settings.gpu_memory_utilization)
    if settings.kv_cache_memory is None:
        budget = max(0, budget - reserved_bytes)
    if ranks is not None:
        shares_memory = device.type == "cpu" and settings.kv_cache_memory is None
        budget = ranks.smallest(budget // ranks.size if shares_memory else budget)
    plan = plan_kv_cache(
        budget_bytes=budget,
        bytes_per_block=bytes_per_block + (0 if draft is None else draft.bytes_per_block),
        model_max_len=decoder.config.max_position_embeddings,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
    )
    if settings.kv_cache_memory is not None and plan.size_bytes < parse_size(settings.kv_cache_memory) // 2:
        log.info(
            "the KV cache is smaller than kv_cache_memory: max_num_seqs sequences of full length need no more",
            asked_mib=parse_size(settings.kv_cache_memory) >> 20,
            max_num_seqs=settings.max_num_seqs,
            max_model_len=plan.max_model_len,
        )
    return replace(plan, bytes_per_block=bytes_per_block)
