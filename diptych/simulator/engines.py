"""An engine pod: the real scheduler over a real block pool, and a runner that only says how long it would take."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from diptych.simulator.costs import CostModel
from diptych.simulator.encoders import Embeddings, EngineImages
from diptych.simulator.world import Clock, Result, Settings
from services.gateway.balancer import Replica
from services.text_engine.core.batch import Batch, SampledToken
from services.text_engine.core.block_manager import BlockManager
from services.text_engine.core.block_pool import BlockPool
from services.text_engine.core.queue_limit import QueueLimit
from services.text_engine.core.scheduler import Scheduler
from services.text_engine.core.sequence import Sequence
from shared.errors import Overloaded

BLOCK_SIZE = 16
TOKEN = SampledToken(1)
SHORT_PROMPT = 64  # tokens to compute: a question without document or picture


@dataclass(slots=True)
class Visit:
    """One request on its way."""

    sequence: Sequence
    arrived: float
    on_end: Callable[[Sequence], None]
    first_token: float = 0.0
    last_token: float = 0.0
    longest_gap_s: float = 0.0
    replica: Replica[str] | None = None


class EnginePod:
    """The engine's loop: schedule, pretend to compute, update."""

    def __init__(
        self, clock: Clock, costs: CostModel, settings: Settings, embeddings: Embeddings, result: Result
    ) -> None:
        self._clock = clock
        self._costs = costs
        self._settings = settings
        self._embeddings = embeddings
        self._result = result
        self._images = EngineImages(self._fetch)
        self.pool = BlockPool(costs.num_blocks)
        self.scheduler = Scheduler(
            BlockManager(self.pool, BLOCK_SIZE, enable_prefix_caching=settings.enable_prefix_caching),
            self._images,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_prefill_tokens_while_decoding=settings.max_prefill_tokens_while_decoding,
            eos_token_ids=frozenset(),
        )
        self.queue = QueueLimit(
            self.scheduler,
            max_waiting_requests=settings.max_waiting_requests,
            max_queue_wait_s=settings.max_queue_wait_s,
        )
        self._visits: dict[Sequence, Visit] = {}
        self._is_busy = False
        self._refusing_s = 0.0

    def add(self, visit: Visit) -> bool:
        """False: it is refused."""
        try:
            self.queue.check(visit.sequence.priority)
        except Overloaded:
            self._refusing_s += self._costs.refusal_s
            return False
        self._visits[visit.sequence] = visit
        self._images.register(visit.sequence)
        self.scheduler.add(visit.sequence)
        self._step()
        return True

    def _fetch(self, key: str) -> None:
        self._embeddings.fetch(key, partial(self._put, key))

    def _put(self, key: str) -> None:
        self._images.put(key)
        self._step()

    def _step(self) -> None:
        if self._is_busy:
            return
        if self._settings.step_ratio is not None or self._settings.step_target_s is not None:
            self._limit_prompts()
        batch = self.scheduler.schedule()
        if not batch.scheduled:
            return
        self._is_busy = True
        seconds = self._costs.seconds(batch.scheduled) + self._refusing_s
        self._refusing_s = 0.0
        use = self.pool.num_referenced / self.pool.num_blocks
        result = self._result
        result.num_steps += 1
        result.busy_s += seconds
        result.kv_use_s += use * seconds
        result.max_kv_use = max(result.max_kv_use, use)
        self._clock.after(seconds, partial(self._finish_step, batch, seconds))

    def _limit_prompts(self) -> None:
        """What an engine would do that knew its own costs exactly."""
        contexts = [s.num_tokens for s in self.scheduler.running if s.num_uncomputed_tokens == 1]
        decode_s = self._costs.decode_step_s(len(contexts), sum(contexts) / max(1, len(contexts)))
        target_s = self._settings.step_target_s or (self._settings.step_ratio or 1.0) * decode_s
        num_tokens = int((target_s - decode_s) / self._costs.prompt_token_s)
        self.scheduler.max_prefill_tokens_while_decoding = max(BLOCK_SIZE, num_tokens)

    def _finish_step(self, batch: Batch, seconds: float) -> None:
        self._is_busy = False
        now = self._clock.now
        result, visits = self._result, self._visits
        outputs = self.scheduler.update(batch, itertools.repeat(TOKEN))
        self.queue.note_step(seconds)
        result.num_output_tokens += len(outputs)
        for output in outputs:
            visit = visits[output.sequence]
            if visit.last_token:
                result.gaps.append(now - visit.last_token)
                visit.longest_gap_s = max(visit.longest_gap_s, now - visit.last_token)
            else:
                self._first_token(visit)
            visit.last_token = now
            if output.finish is not None:
                self._end(visit)
        self._step()

    def _first_token(self, visit: Visit) -> None:
        sequence = visit.sequence
        num_cached_tokens = sequence.num_cached_tokens or 0
        visit.first_token = self._clock.now
        ttft = visit.first_token - visit.arrived
        self._result.ttft.append(ttft)
        if not sequence.images and sequence.num_prompt_tokens - num_cached_tokens <= SHORT_PROMPT:
            self._result.short_ttft.append(ttft)
        self._result.num_prompt_tokens += sequence.num_prompt_tokens
        self._result.num_cached_tokens += num_cached_tokens

    def _end(self, visit: Visit) -> None:
        del self._visits[visit.sequence]
        self._images.release(visit.sequence)
        self._result.num_finished += 1
        self._result.num_good += self._settings.slo.is_met(visit.first_token - visit.arrived, visit.longest_gap_s)
        self._result.num_preemptions += visit.sequence.num_preemptions
        if visit.replica is not None:
            visit.replica.outstanding -= 1
        visit.on_end(visit.sequence)
