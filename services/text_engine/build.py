"""Assembles an engine from its settings: checkpoint, device, kernels, KV cache, scheduler.

The only place that knows all the parts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.text_engine.adapters import Adapters
from services.text_engine.chat_template import ChatTemplate
from services.text_engine.config import TextEngineSettings
from services.text_engine.core.block_manager import BlockManager
from services.text_engine.core.block_pool import BlockPool
from services.text_engine.core.host_blocks import HostBlocks
from services.text_engine.core.queue_limit import QueueLimit
from services.text_engine.core.scheduler import Scheduler
from services.text_engine.drafting import check_vocabulary, make_draft_runner, make_drafter
from services.text_engine.embedding_store import EmbeddingStore
from services.text_engine.engine import Engine
from services.text_engine.engine_io import EngineRequest, RequestFailed
from services.text_engine.models.config import ModelConfig
from services.text_engine.models.load_config import load_model_config
from services.text_engine.preflight import check_settings
from services.text_engine.prompt import PromptBuilder
from services.text_engine.runner.device_sampling import MAX_VOCAB_SIZE
from services.text_engine.runner.grammar import GrammarCompiler
from services.text_engine.runner.kv_cache import BLOCK_SIZE
from services.text_engine.runner.loading import LoadedModel, load_model, rank_device
from services.text_engine.runner.logits_processors import Vocabulary, load_logits_processors
from services.text_engine.runner.model_runner import ModelRunner
from services.text_engine.runner.sampler import Sampler
from services.text_engine.runner.tensor_parallel import Workers
from services.text_engine.tokenizer import Tokenizer
from shared.log import get_logger
from shared.reasoning import REASONING_MARKS, ReasoningFormat
from shared.resources import available_cores
from shared.sampling import SamplingParams
from shared.torch_io import dtype_name
from shared.wire.engine import ModelInfo, ToolFormat
from shared.wire.images import ImageRef

log = get_logger(__name__)

# A step may be slow without anything being wrong; one that takes this many times `step_timeout_s` waits for a rank.
HANGING_AFTER_STEP_TIMEOUTS = 2


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine that can run, and what its API needs to know of the model.

    info             without adapters, which come and go
    num_row_parts    how many vectors of the hidden size make an image's row
    adapted_config   the model's, for reading further adapters for it; None: it has none
    """

    engine: Engine
    prompts: PromptBuilder
    info: ModelInfo
    num_row_parts: int = 1
    adapted_config: ModelConfig | None = None


def build_engine(
    settings: TextEngineSettings,
    on_wanted: Callable[[ImageRef], None],
    on_unwanted: Callable[[str], None] = lambda image_key: None,
    on_failure: Callable[[str], None] = lambda reason: None,
) -> BuiltEngine:
    """Load the checkpoint and put an engine around it; takes seconds to minutes and logs what it is doing.

    on_wanted   hears, from the engine's thread, of every image whose embedding must be fetched
    on_unwanted   alike, of the key of every image that need not be fetched any more
    on_failure  hears, from any thread, why the engine can never step again: a process that shares the model is gone
    Raises ValueError or OSError subclasses whose message says which setting or file is wrong.
    """
    check_settings(settings)
    if settings.tensor_parallel_size == 1:
        return _build(settings, on_wanted, on_unwanted, None)
    rank_device(settings, 0)  # too few GPUs: said before any process is started
    workers = Workers(settings, on_failure)
    try:
        return _build(settings, on_wanted, on_unwanted, workers)
    except BaseException:
        workers.close()
        raise


def _build(
    settings: TextEngineSettings,
    on_wanted: Callable[[ImageRef], None],
    on_unwanted: Callable[[str], None],
    workers: Workers | None,
) -> BuiltEngine:
    started = time.monotonic()
    device = rank_device(settings, 0)
    config = load_model_config(settings.model, settings.model_implementation)
    tokenizer = Tokenizer.load(settings.model)
    check_vocabulary(settings, tokenizer)
    model = load_model(settings, config, device, None if workers is None else workers.join(device))
    plan = model.plan
    name = settings.served_model_name or settings.model.name

    template = _template(settings.model, tokenizer)
    reasoning_format = _reasoning_format(settings, template)
    reasoning = None if reasoning_format is None else REASONING_MARKS[reasoning_format]
    if reasoning is not None:
        tokenizer = tokenizer.showing(reasoning.opening, reasoning.closing)
    embeddings = EmbeddingStore(on_wanted, on_unwanted, max_idle_bytes=settings.max_idle_embedding_bytes)
    eos_token_ids = frozenset(config.eos_token_ids)
    vocab_size = min(tokenizer.vocab_size, config.vocab_size)
    banned = [] if config.image_token_id is None else [config.image_token_id]
    draw_tokens = model.parts.draw_tokens if vocab_size <= MAX_VOCAB_SIZE else None
    sampler = Sampler(vocab_size, [t for t in banned if t < vocab_size], eos_token_ids, draw_tokens)
    draft = make_draft_runner(model, vocab_size=vocab_size, banned_ids=banned)
    runner = ModelRunner(
        model.forward_pass,
        sampler,
        embeddings,
        model.allocate_kv_caches,
        block_size=BLOCK_SIZE,
        has_grid_positions=config.rope.sections is not None,
        merge_rows=model.parts.merge_rows,
        workers=workers,
        draft=draft,
    )
    blocks = BlockManager(
        BlockPool(plan.num_blocks),
        BLOCK_SIZE,
        enable_prefix_caching=settings.enable_prefix_caching,
        host=None if model.host_tier is None else HostBlocks(model.host_tier.num_slots),
    )
    scheduler = Scheduler(
        blocks,
        embeddings,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        eos_token_ids=eos_token_ids,
        max_prefill_tokens_while_decoding=settings.max_prefill_tokens_while_decoding,
    )
    grammars = GrammarCompiler(
        tokenizer,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        num_workers=max(1, available_cores() // 2),
        reasoning=reasoning,
    )
    engine = Engine(
        scheduler,
        runner,
        tokenizer,
        embeddings,
        grammars,
        load_logits_processors(
            settings.logits_processors,
            Vocabulary(vocab_size, eos_token_ids, tokenizer.encode_literal, tokenizer.decode),
        ),
        vocab_size=vocab_size,
        max_model_len=plan.max_model_len,
        queue=QueueLimit(
            scheduler,
            max_waiting_requests=settings.max_waiting_requests,
            max_queue_wait_s=settings.max_queue_wait_s,
        ),
        adapters=_adapters(name, settings, model),
    )
    log.info("warming up: a short answer, so that no request waits for what only the first one needs")
    for temperature in (0.0, 0.7) if device.type == "cuda" else (0.0,):  # a draw has kernels of its own there
        _warm_up(engine, temperature)
    scheduler.drafter = make_drafter(settings, runner, draft, blocks, banned_ids=banned)
    if workers is not None:
        workers.expect_steps_within(HANGING_AFTER_STEP_TIMEOUTS * settings.step_timeout_s)
    log.info("engine ready", model=name, seconds=round(time.monotonic() - started, 1))
    prompts = PromptBuilder(
        tokenizer,
        template,
        config.image_token_id,
        config.image_mark_id,
        reasoning,
        max_model_len=plan.max_model_len,
    )
    tool_format = _tool_format(settings, template, prompts)
    info = _info(name, config, model, vocab_size, tool_format, reasoning_format)
    adapted_config = None if model.adapted is None else model.adapted.config
    return BuiltEngine(engine, prompts, info, config.num_row_parts, adapted_config)


def _adapters(name: str, settings: TextEngineSettings, model: LoadedModel) -> Adapters:
    if model.adapted is None:
        return Adapters(name)
    return Adapters(name, model.adapted.adapters, max_loras=settings.max_loras, first=model.adapted.first)


def _warm_up(engine: Engine, temperature: float) -> None:
    """Run one short answer, so that tables are built and kernels laid out before the first request waits for them.

    Shorter than a block: nothing of it stays in the prefix cache.
    """
    token_ids = [0] * min(8, engine.max_model_len - 1)
    sampling = SamplingParams(temperature=temperature, max_tokens=2, ignore_eos=True)
    engine.add(EngineRequest(request_id="warm-up", token_ids=token_ids, sampling=sampling))
    while engine.num_requests:
        failed = [output for output in engine.step() or [] if isinstance(output, RequestFailed)]
        if failed:
            raise RuntimeError(f"the model does not run: {failed[0].error.message}")


def _template(folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    model_type = json.loads((folder / "config.json").read_text()).get("model_type", "")
    template = ChatTemplate.load(
        folder, model_type=model_type, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token
    )
    if template is None:
        log.warning("the checkpoint has no chat template: only /v1/completions will work", folder=str(folder))
    return template


def _tool_format(settings: TextEngineSettings, template: ChatTemplate | None, prompts: PromptBuilder) -> ToolFormat:
    if settings.tool_call_parser == "auto":
        return prompts.tool_format
    if template is not None and not template.takes_tools and settings.tool_call_parser != "hermes":
        log.warning(
            "the chat template takes no tools, so the model is told to call them in another way than they are read",
            told="hermes",
            read=settings.tool_call_parser,
        )
    return settings.tool_call_parser


def _reasoning_format(settings: TextEngineSettings, template: ChatTemplate | None) -> ReasoningFormat | None:
    if settings.reasoning_parser == "none":
        return None
    if settings.reasoning_parser == "auto":
        return None if template is None else template.reasoning_format
    return settings.reasoning_parser


def _info(
    name: str,
    config: ModelConfig,
    model: LoadedModel,
    vocab_size: int,
    tool_format: ToolFormat,
    reasoning_format: ReasoningFormat | None,
) -> ModelInfo:
    return ModelInfo(
        id=name,
        max_model_len=model.plan.max_model_len,
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        dtype=dtype_name(model.dtype),
        num_kv_blocks=model.plan.num_blocks,
        block_size=BLOCK_SIZE,
        supports_images=config.image_token_id is not None,
        implementation=config.implementation,
        tool_format=tool_format,
        reasoning_format=reasoning_format,
        created=int(time.time()),
    )
