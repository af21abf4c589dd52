"""One rank's model, ready to run: device, kernels, weights, KV cache. Every rank of an engine loads by this."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial

import torch

from services.text_engine.attention.cpu_backend import CpuAttention
from services.text_engine.attention.interface import AttentionBackend
from services.text_engine.attention.torch_reference import TorchReferenceAttention
from services.text_engine.config import TextEngineSettings
from services.text_engine.kernels import reference
from services.text_engine.kernels.interface import Kernels
from services.text_engine.kernels.native import NativeKernels
from services.text_engine.kernels.native_library import load_native
from services.text_engine.kernels.native_matmul import PackedLinear, packing_pays
from services.text_engine.models.config import ModelConfig
from services.text_engine.models.decoder import Decoder
from services.text_engine.models.layers import Linear, MakeProduct
from services.text_engine.models.weights import load_decoder, random_decoder
from services.text_engine.runner.cuda_graphs import graph_memory_bytes, graph_sizes
from services.text_engine.runner.device_sampling import DrawTokens
from services.text_engine.runner.forward_pass import ForwardPass
from services.text_engine.runner.image_inputs import MergeRows
from services.text_engine.runner.kv_cache import BLOCK_SIZE, KVCachePlan, memory_budget, plan_kv_cache
from services.text_engine.runner.tensor_parallel import ProcessRanks
from shared.cuda_capture import CudaCapture
from shared.device import choose_device, choose_dtype
from shared.log import get_logger
from shared.resources import available_cores
from shared.torch_io import dtype_name

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """What differs between devices.

    merge_rows   puts image rows among the others'; None: as `image_inputs` does by itself
    draw_tokens  samples on the device; None: as `sampler` does by itself
    """

    attention: AttentionBackend
    kernels: Kernels
    make_product: MakeProduct = Linear
    merge_rows: MergeRows | None = None
    draw_tokens: DrawTokens | None = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What one rank holds.

    parts  the kernels for its device
    """

    decoder: Decoder
    kv_caches: list[torch.Tensor]
    plan: KVCachePlan
    forward_pass: ForwardPass
    parts: DeviceParts
    dtype: torch.dtype
    device: torch.device


def rank_device(settings: TextEngineSettings, index: int) -> torch.device:
    """The device of one rank. Raises ValueError if there are too few."""
    device = choose_device(settings.device)
    size = settings.tensor_parallel_size
    if device.type != "cuda" or size == 1:
        return device
    if torch.cuda.device_count() < size:
        raise ValueError(
            f"tensor_parallel_size is {size}, but torch sees {torch.cuda.device_count()} CUDA devices on this machine"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def load_model(
    settings: TextEngineSettings, config: ModelConfig, device: torch.device, ranks: ProcessRanks | None = None
) -> LoadedModel:
    """Load this rank's part of the checkpoint and make room for its KV cache; a collective where there are ranks.

    config  the whole model's
    Raises ValueError or OSError subclasses whose message says which setting or file is wrong.
    """
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
    load = random_decoder if settings.load_format == "dummy" else partial(load_decoder, settings.model)
    decoder = load(
        config,
        parts.attention,
        parts.kernels,
        dtype=dtype,
        device=device,
        make_product=parts.make_product,
        ranks=ranks,
    )
    uses_graphs = device.type == "cuda" and settings.attention_backend != "reference" and not settings.enforce_eager
    reserved = graph_memory_bytes(decoder.config, settings.max_num_seqs, dtype) if uses_graphs else 0
    plan = _plan(settings, decoder, parts.attention, device, ranks, reserved)
    log.info(
        "KV cache",
        blocks=plan.num_blocks,
        tokens=plan.num_tokens,
        mib=plan.size_bytes >> 20,
        max_model_len=plan.max_model_len,
    )
    attention = parts.attention
    kv_caches = [attention.allocate_kv_cache(plan.num_blocks, BLOCK_SIZE, shape) for shape in decoder.attention_shapes]
    forward_pass = ForwardPass(decoder, kv_caches, device)
    if uses_graphs:
        sizes = graph_sizes(settings.max_num_seqs)
        forward_pass.capture(CudaCapture(device), sizes, max_blocks=-(-plan.max_model_len // BLOCK_SIZE))
    return LoadedModel(decoder, kv_caches, plan, forward_pass, parts, dtype, device)


def _set_threads(num_threads: int | None, num_ranks: int) -> None:
    """The model's threads; ranks on one CPU share them."""
    of_all_ranks = num_threads or int(os.environ.get("OMP_NUM_THREADS") or available_cores())
    torch.set_num_threads(max(1, of_all_ranks // num_ranks))


def choose_parts(settings: TextEngineSettings, device: torch.device, dtype: torch.dtype) -> DeviceParts:
    """Triton's kernels on a GPU, the compiled ones on a CPU where they exist and are wanted, else plain PyTorch."""
    if settings.attention_backend == "triton" or (settings.attention_backend == "auto" and device.type == "cuda"):
        return _triton_parts(settings, device, dtype)
    if settings.kv_cache_dtype != "auto":
        raise ValueError(
            f"kv_cache_dtype is {settings.kv_cache_dtype!r}, which needs the Triton kernels, and so a GPU; use 'auto'"
        )
    wants_native = settings.attention_backend != "reference" and not settings.enforce_eager
    library = load_native() if device.type == "cpu" and wants_native else None
    if library is not None and dtype in (torch.bfloat16, torch.float32):
        make_product = partial(PackedLinear, library) if packing_pays(library, dtype) else Linear
        return DeviceParts(CpuAttention(library, dtype), NativeKernels(library), make_product)
    if settings.attention_backend == "cpu":
        raise ValueError(
            "attention_backend is 'cpu', but its compiled kernels cannot be used here (device "
            f"{device}, dtype {dtype_name(dtype)}); use 'auto' or 'reference'"
        )
    return DeviceParts(TorchReferenceAttention(dtype, device), reference)


def _triton_parts(settings: TextEngineSettings, device: torch.device, dtype: torch.dtype) -> DeviceParts:
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "attention_backend is 'triton', which needs a GPU (or, for tests, TRITON_INTERPRET=1); use 'auto'"
        )
    try:  # torch's builds for CPUs come without it
        from services.text_engine.attention.triton_backend import TritonAttention
        from services.text_engine.kernels.merge_rows import merge_rows
        from services.text_engine.kernels.sample import sample
        from services.text_engine.kernels.triton_kernels import TritonKernels
    except ModuleNotFoundError as error:
        raise ValueError(f"on a GPU the engine needs the package triton ({error}); or use 'reference'") from error
    attention = TritonAttention(
        dtype, device, max_num_seqs=settings.max_num_seqs, kv_cache_format=settings.kv_cache_dtype
    )
    return DeviceParts(attention, TritonKernels(), merge_rows=merge_rows, draw_tokens=sample)


def _plan(
    settings: TextEngineSettings,
    decoder: Decoder,
    attention: AttentionBackend,
    device: torch.device,
    ranks: ProcessRanks | None,
    reserved_bytes: int,
) -> KVCachePlan:
    """The same on every rank: a block has its share on each, so the rank with the least room decides."""
    shapes = decoder.attention_shapes
    bytes_per_block = sum(attention.allocate_kv_cache(1, BLOCK_SIZE, shape).nbytes for shape in shapes)
    budget = memory_budget(device, settings.kv_cache_memory, settings.gpu_memory_utilization)
    if settings.kv_cache_memory is None:
        budget = max(0, budget - reserved_bytes)
    if ranks is not None:
        shares_memory = device.type == "cpu" and settings.kv_cache_memory is None
        budget = ranks.smallest(budget // ranks.size if shares_memory else budget)
    return plan_kv_cache(
        budget_bytes=budget,
        bytes_per_block=bytes_per_block,
        model_max_len=decoder.config.max_position_embeddings,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
    )
