"""Engines, encoders and a gateway on one simulated clock. What decides is real: Scheduler, BlockManager, BlockPool and
the gateway's balancer; what computes is a cost model. Redis never forgets here, nothing fails, and nothing between the
services takes time but the fetch of an embedding.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import blake2b

from diptych.simulator.costs import CostModel
from diptych.simulator.encoders import Embeddings
from diptych.simulator.engines import EnginePod, Visit
from diptych.simulator.trace import Conversation
from diptych.simulator.world import Clock, Result, Settings, make_replicas
from services.gateway.balancer import Pool, Replica
from services.text_engine.core.sequence import ImageSpan, Sequence
from shared.sampling import SamplingParams

PLACEHOLDER = 0
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
FIRST_NEW_TOKEN = 1_000_000  # below: system prompts


class Users:
    """Holds conversations: each question goes, with all before it, where the gateway's balancer says."""

    def __init__(self, clock: Clock, costs: CostModel, settings: Settings, seed: int, result: Result) -> None:
        rng = random.Random(f"balancer {seed}")
        self._clock = clock
        self._costs = costs
        self._result = result
        self._embeddings = Embeddings(clock, costs, settings.encoders, rng, result)
        self._embeddings.remember(image_key(number) for number in range(settings.num_known_images))
        self._pool: Pool[str] = Pool(lambda: clock.now, rng, by_turns=settings.routing == "round_robin")
        pods = [EnginePod(clock, costs, settings, self._embeddings, result) for _ in range(settings.engines)]
        self.engines = make_replicas(self._pool, "engine", pods)
        self._next_token = FIRST_NEW_TOKEN
        self._gateway_sheds = settings.gateway_sheds

    def play(self, trace: Iterator[Conversation], *, max_users: int | None = None) -> None:
        """Open loop: conversations begin when they arrive. max_users: so many at a time instead, the next at once."""
        if max_users is None:
            self._play_next(trace)
        for _ in range(max_users or 0):
            self._replace_user(trace)
        self._clock.run()
        self._result.seconds = self._clock.now
        for engine in self.engines.values():
            assert not engine.scheduler.has_work
            assert engine.pool.num_referenced == 0

    def _play_next(self, trace: Iterator[Conversation]) -> None:
        conversation = next(trace, None)
        if conversation is not None:
            self._clock.at(conversation.arrival_s, lambda: self._begin(conversation, lambda: None))
            self._clock.at(conversation.arrival_s, lambda: self._play_next(trace))

    def _replace_user(self, trace: Iterator[Conversation]) -> None:
        conversation = next(trace, None)
        if conversation is not None:
            self._begin(conversation, lambda: self._clock.after(0, lambda: self._replace_user(trace)))

    def _begin(self, conversation: Conversation, on_end: Callable[[], None]) -> None:
        history = list(
            range(conversation.system_prompt * 4096, conversation.system_prompt * 4096 + conversation.system_tokens)
        )
        self._ask(conversation, 0, history, (), b"", on_end)

    def _ask(
        self,
        conversation: Conversation,
        number: int,
        history: list[int],
        images: tuple[ImageSpan, ...],
        affinity: bytes,
        on_end: Callable[[], None],
    ) -> None:
        """The conversation's turn `number`; history, images and affinity are those of the turns before it."""
        turn = conversation.turns[number]
        num_image_tokens = self._costs.image_tokens
        taken = turn.num_output_tokens + turn.num_new_tokens + len(turn.images) * num_image_tokens
        num_left = self._costs.max_model_len - taken
        if len(history) > num_left:
            history, images = history[: conversation.system_tokens], ()  # the user begins anew
        token_ids = history[:num_left]
        for image in turn.images:
            images = (*images, ImageSpan(image_key(image), len(token_ids), num_image_tokens))
            token_ids += [PLACEHOLDER] * num_image_tokens
        token_ids += range(self._next_token, self._next_token + turn.num_new_tokens)
        affinity = affinity or f"{conversation.system_prompt} {turn.images} {self._next_token}".encode()
        self._next_token += turn.num_new_tokens

        def ended(sequence: Sequence) -> None:
            if number + 1 == len(conversation.turns):
                on_end()
                return
            go_on = partial(self._ask, conversation, number + 1, sequence.token_ids, images, affinity, on_end)
            self._clock.after(conversation.turns[number + 1].think_s, go_on)

        sequence = Sequence(
            "",
            token_ids,
            len(token_ids),
            GREEDY,
            len(token_ids) + turn.num_output_tokens,
            priority=turn.priority,
            images=images,
        )
        self._send(Visit(sequence, self._clock.now, ended), affinity)

    def _send(self, visit: Visit, affinity: bytes) -> None:
        priority = visit.sequence.priority
        self._result.num_requests += 1
        self._result.num_images += len(visit.sequence.images)
        if self._pool.queue_opens_in_s(self._pool.available(), priority):
            self._result.num_shed += 1
            self._refuse(visit)
            return
        for span in visit.sequence.images:
            self._embeddings.want(span.image_key)
        tried: list[Replica[str]] = []
        while (replica := self._next(tried, priority, affinity)) is not None:
            visit.replica = replica
            replica.outstanding += 1
            engine = self.engines[replica.url]
            is_taken = engine.add(visit)
            if self._gateway_sheds:
                self._pool.note_queue(replica, priority, engine.queue.opens_in_s(priority))
            if is_taken:
                return
            replica.outstanding -= 1
            tried.append(replica)
        self._refuse(visit)

    def _next(self, tried: list[Replica[str]], priority: int, affinity: bytes) -> Replica[str] | None:
        return self._pool.least_loaded(self._pool.with_open_queue(self._pool.available(tried), priority), affinity)

    def _refuse(self, visit: Visit) -> None:
        self._result.num_refused += 1
        visit.on_end(visit.sequence)


def image_key(number: int) -> str:
    return blake2b(number.to_bytes(8, "big"), digest_size=32).hexdigest()


def simulate(
    costs: CostModel,
    settings: Settings,
    trace: Iterator[Conversation],
    *,
    seed: int = 0,
    max_users: int | None = None,
) -> Result:
    """Play a trace to its end. Raises AssertionError if a request or a block is lost."""
    result = Result()
    Users(Clock(), costs, settings, seed, result).play(trace, max_users=max_users)
    assert result.num_finished + result.num_refused == result.num_requests
    return result
