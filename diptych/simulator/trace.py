"""Whose questions come when: conversations with shared system prompts, pictures that come again, and think time.

Lengths are drawn from lognormal distributions, picture popularity from a power law. Equal arguments give equal traces.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

BURST_SIZE = 24  # conversations on average
BURST_SPREAD_S = 0.5


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lognormal, in tokens, cut at the ends."""

    median: int
    sigma: float
    most: int
    least: int = 4

    def draw(self, rng: random.Random) -> int:
        return max(self.least, min(self.most, round(self.median * math.exp(rng.gauss(0, self.sigma)))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """What is asked.

    document, document_share   a question may bring a long text with it
    image_share                of conversations that begin with a picture
    num_images                 different pictures there are; few: much reuse
    mean_turns                 of a conversation; each turn sends all before it again
    """

    question: Lengths
    answer: Lengths
    document: Lengths = Lengths(1, 0, 1)
    document_share: float = 0.0
    image_share: float = 0.0
    num_images: int = 1
    mean_turns: float = 1.0
    think_s: float = 0.0
    num_system_prompts: int = 1
    system_tokens: int = 0


_CHAT: Final = Mix(
    question=Lengths(50, 0.8, 400),
    answer=Lengths(50, 0.6, 200),
    image_share=0.3,
    num_images=5000,
    mean_turns=2.5,
    think_s=8.0,
    num_system_prompts=8,
    system_tokens=64,
)
MIXES: Final = {
    "chat": _CHAT,
    "documents": Mix(
        question=Lengths(50, 0.8, 400),
        answer=Lengths(60, 0.6, 200),
        document=Lengths(1000, 0.3, 1700, 400),
        document_share=0.15,
        mean_turns=1.0,
        system_tokens=64,
    ),
    "pictures": Mix(
        question=Lengths(30, 0.6, 200),
        answer=Lengths(50, 0.6, 200),
        image_share=1.0,
        num_images=20_000,
        mean_turns=1.5,
        think_s=8.0,
        system_tokens=32,
    ),
}


@dataclass(frozen=True, slots=True)
class Turn:
    """think_s   from the answer before, or from the conversation's arrival, to this question
    images    pictures by number, before the text"""

    think_s: float
    num_new_tokens: int
    num_output_tokens: int
    images: tuple[int, ...] = ()
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Conversation:
    arrival_s: float
    system_prompt: int
    system_tokens: int
    turns: tuple[Turn, ...]


def make_trace(mix: Mix, arrivals: Iterator[float], *, num_requests: int, seed: int) -> Iterator[Conversation]:
    """Conversations in order of arrival, `num_requests` questions in all."""
    rng = random.Random(f"trace {seed}")
    left = num_requests
    while left > 0:
        num_turns = min(left, _geometric(rng, mix.mean_turns))
        left -= num_turns
        turns = tuple(_turn(mix, rng, is_first=i == 0) for i in range(num_turns))
        yield Conversation(next(arrivals), rng.randrange(mix.num_system_prompts), mix.system_tokens, turns)


def _turn(mix: Mix, rng: random.Random, *, is_first: bool) -> Turn:
    num_new_tokens = mix.question.draw(rng)
    if rng.random() < mix.document_share:
        num_new_tokens += mix.document.draw(rng)
    images: tuple[int, ...] = ()
    if is_first and rng.random() < mix.image_share:
        images = (int(mix.num_images ** rng.random()) - 1,)  # the k-th picture about 1/k as often as the first
    think_s = 0.0 if is_first or not mix.think_s else rng.expovariate(1 / mix.think_s)
    return Turn(think_s, num_new_tokens, mix.answer.draw(rng), images)


def _geometric(rng: random.Random, mean: float) -> int:
    if mean <= 1:
        return 1
    return 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / mean))


def poisson(rate: float, seed: int) -> Iterator[float]:
    """`rate` conversations a second, independent of each other."""
    rng = random.Random(f"arrivals {seed}")
    now = 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


def bursty(rate: float, seed: int) -> Iterator[float]:
    """The same rate, but in bursts within half a second and quiet between them."""
    rng = random.Random(f"bursts {seed}")
    period = BURST_SIZE / rate
    spread = min(BURST_SPREAD_S, period / 2)
    start = 0.0
    while True:
        start += rng.expovariate(1 / (period - spread))
        yield from sorted(start + rng.uniform(0, spread) for _ in range(_geometric(rng, BURST_SIZE)))
        start += spread


def means(mix: Mix, image_tokens: int) -> tuple[float, float, float]:
    """Of a sample: new prompt tokens a request, context a request, output tokens a request."""
    rng = random.Random("means")
    num_turns = num_new = num_context = num_output = 0
    for _ in range(2000):
        context = mix.system_tokens
        for i in range(_geometric(rng, mix.mean_turns)):
            turn = _turn(mix, rng, is_first=i == 0)
            new = turn.num_new_tokens + len(turn.images) * image_tokens
            context += new
            num_turns, num_new, num_context = num_turns + 1, num_new + new, num_context + context
            num_output += turn.num_output_tokens
            context += turn.num_output_tokens
    return num_new / num_turns, num_context / num_turns, num_output / num_turns
