"""Assembles an engine from its settings: checkpoint, device, kernels, KV cache, scheduler.

The only place that knows all the parts.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from services.text_engine.attention.cpu_backend import CpuAttention
from services.text_engine.attention.interface import AttentionBackend
from services.text_engine.attention.torch_reference import TorchReferenceAttention
from services.text_engine.chat_template import ChatTemplate
from services.text_engine.config import TextEngineSettings
from services.text_engine.core.block_manager import BlockManager
from services.text_engine.core.block_pool import BlockPool
from services.text_engine.core.scheduler import Scheduler
from services.text_engine.embedding_store import EmbeddingStore
from services.text_engine.engine import Engine, EngineRequest, RequestFailed
from services.text_engine.kernels import reference
from services.text_engine.kernels.interface import Kernels
from services.text_engine.kernels.native import NativeKernels
from services.text_engine.kernels.native_library import load_native
from services.text_engine.kernels.native_matmul import PackedLinear, packing_pays
from services.text_engine.models.config import ModelConfig
from services.text_engine.models.decoder import attention_shapes
from services.text_engine.models.families import load_model_config
from services.text_engine.models.layers import Linear, MakeProduct
from services.text_engine.models.weights import load_decoder
from services.text_engine.prompt import PromptBuilder
from services.text_engine.runner.kv_cache import BLOCK_SIZE, KVCachePlan, memory_budget, plan_kv_cache
from services.text_engine.runner.model_runner import ModelRunner
from services.text_engine.runner.sampler import Sampler
from services.text_engine.tokenizer import Tokenizer
from shared.device import choose_device, choose_dtype
from shared.log import get_logger
from shared.resources import available_cores
from shared.sampling import SamplingParams
from shared.torch_io import dtype_name
from shared.wire import ImageRef, ModelInfo

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine that can run, and what its API needs to know of the model."""

    engine: Engine
    prompts: PromptBuilder
    info: ModelInfo


def build_engine(settings: TextEngineSettings, on_wanted: Callable[[ImageRef], None]) -> BuiltEngine:
    """Load the checkpoint and put an engine around it; takes seconds to minutes and logs what it is doing.

    on_wanted   hears, from the engine's thread, of every image whose embedding must be fetched
    Raises ValueError or OSError subclasses whose message says which setting or file is wrong.
    """
    started = time.monotonic()
    device = choose_device(settings.device)
    _set_threads(settings.num_threads)
    config = load_model_config(settings.model)
    dtype = choose_dtype(settings.dtype, device)
    parts = _choose_parts(settings, device, dtype)
    attention = parts.attention
    name = settings.served_model_name or settings.model.name
    log.info("loading model", model=name, dtype=dtype_name(dtype), device=str(device), threads=torch.get_num_threads())
    decoder = load_decoder(
        settings.model,
        config,
        attention,
        parts.kernels,
        dtype=dtype,
        device=device,
        make_product=parts.make_product,
    )
    plan = _plan(settings, config, attention, device)
    log.info(
        "KV cache",
        blocks=plan.num_blocks,
        tokens=plan.num_tokens,
        mib=plan.size_bytes >> 20,
        max_model_len=plan.max_model_len,
    )
    kv_caches = [attention.allocate_kv_cache(plan.num_blocks, BLOCK_SIZE, shape) for shape in decoder.attention_shapes]

    tokenizer = Tokenizer.load(settings.model)
    embeddings = EmbeddingStore(on_wanted)
    eos_token_ids = frozenset(config.eos_token_ids)
    vocab_size = min(tokenizer.vocab_size, config.vocab_size)
    banned = [] if config.image_token_id is None else [config.image_token_id]
    sampler = Sampler(vocab_size, [t for t in banned if t < vocab_size], eos_token_ids)
    runner = ModelRunner(decoder, kv_caches, sampler, embeddings, block_size=BLOCK_SIZE, device=device)
    blocks = BlockManager(BlockPool(plan.num_blocks), BLOCK_SIZE, enable_prefix_caching=settings.enable_prefix_caching)
    scheduler = Scheduler(
        blocks,
        embeddings,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        eos_token_ids=eos_token_ids,
    )
    engine = Engine(
        scheduler,
        runner,
        tokenizer,
        embeddings,
        vocab_size=vocab_size,
        max_model_len=plan.max_model_len,
        max_waiting_requests=settings.max_waiting_requests,
    )
    _warm_up(engine)
    log.info("engine ready", model=name, seconds=round(time.monotonic() - started, 1))
    return BuiltEngine(
        engine, _prompts(settings.model, tokenizer, config), _info(name, config, plan, vocab_size, dtype)
    )


def _warm_up(engine: Engine) -> None:
    """Run one short answer, so that tables are built and kernels laid out before the first request waits for them.

    Shorter than a block: nothing of it stays in the prefix cache.
    """
    token_ids = [0] * min(8, engine.max_model_len - 1)
    sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    engine.add(EngineRequest(request_id="warm-up", token_ids=token_ids, sampling=sampling))
    while engine.num_requests:
        failed = [output for output in engine.step() or [] if isinstance(output, RequestFailed)]
        if failed:
            raise RuntimeError(f"the model does not run: {failed[0].error.message}")


def _set_threads(num_threads: int | None) -> None:
    torch.set_num_threads(num_threads or int(os.environ.get("OMP_NUM_THREADS") or available_cores()))


@dataclass(frozen=True, slots=True)
class _DeviceParts:
    """What differs between devices."""

    attention: AttentionBackend
    kernels: Kernels
    make_product: MakeProduct = Linear


def _choose_parts(settings: TextEngineSettings, device: torch.device, dtype: torch.dtype) -> _DeviceParts:
    """The compiled CPU kernels where they exist and are wanted, else plain PyTorch."""
    wants_native = settings.attention_backend != "reference" and not settings.enforce_eager
    library = load_native() if device.type == "cpu" and wants_native else None
    if library is not None and dtype in (torch.bfloat16, torch.float32):
        make_product = partial(PackedLinear, library) if packing_pays(library, dtype) else Linear
        return _DeviceParts(CpuAttention(library, dtype), NativeKernels(library), make_product)
    if settings.attention_backend == "cpu":
        raise ValueError(
            "attention_backend is 'cpu', but its compiled kernels cannot be used here (device "
            f"{device}, dtype {dtype_name(dtype)}); use 'auto' or 'reference'"
        )
    return _DeviceParts(TorchReferenceAttention(dtype, device), reference)


def _plan(
    settings: TextEngineSettings, config: ModelConfig, attention: AttentionBackend, device: torch.device
) -> KVCachePlan:
    bytes_per_block = sum(
        attention.allocate_kv_cache(1, BLOCK_SIZE, shape).nbytes for shape in attention_shapes(config)
    )
    return plan_kv_cache(
        budget_bytes=memory_budget(device, settings.kv_cache_memory, settings.gpu_memory_utilization),
        bytes_per_block=bytes_per_block,
        model_max_len=config.max_position_embeddings,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
    )


def _prompts(folder: Path, tokenizer: Tokenizer, config: ModelConfig) -> PromptBuilder:
    model_type = json.loads((folder / "config.json").read_text()).get("model_type", "")
    template = ChatTemplate.load(
        folder, model_type=model_type, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token
    )
    if template is None:
        log.warning("the checkpoint has no chat template: only /v1/completions will work", folder=str(folder))
    return PromptBuilder(tokenizer, template, config.image_token_id)


def _info(name: str, config: ModelConfig, plan: KVCachePlan, vocab_size: int, dtype: torch.dtype) -> ModelInfo:
    return ModelInfo(
        id=name,
        max_model_len=plan.max_model_len,
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        dtype=dtype_name(dtype),
        num_kv_blocks=plan.num_blocks,
        block_size=BLOCK_SIZE,
        supports_images=config.image_token_id is not None,
        created=int(time.time()),
    )
