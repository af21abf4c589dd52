"""What will be asked, and how fast answers should come: the two things that a plan starts from."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from diptych.simulator.trace import Conversation, Lengths, Turn, bursty, poisson

Arrivals = Literal["poisson", "bursty"]

SIGMA: Final = 0.6  # of the lognormal lengths: the 95th percentile is 2.2 times the mean
LONGEST: Final = 4.0  # times the mean
NUM_KNOWN_IMAGES: Final = 5000  # those that come again, all equally often
_ARRIVALS: Final[dict[Arrivals, Callable[[float, int], Iterator[float]]]] = {"poisson": poisson, "bursty": bursty}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Means over requests.

    prompt_tokens   of text, shared_tokens included; pictures come on top
    shared_tokens   with which every prompt begins: a system prompt, tools
    pictures        in one request
    new_pictures    share of them that no cache knows
    """

    requests_per_s: float
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int = 0
    pictures: float = 0.0
    new_pictures: float = 1.0
    arrivals: Arrivals = "poisson"

    @property
    def new_pictures_per_s(self) -> float:
        return self.requests_per_s * self.pictures * self.new_pictures

    def context_tokens(self, image_tokens: int) -> float:
        """Of the mean request, at its end."""
        return self.prompt_tokens + self.pictures * image_tokens + self.output_tokens

    def trace(
        self, *, num_requests: int, image_tokens: int, max_model_len: int, seed: int = 0
    ) -> Iterator[Conversation]:
        """Requests in order of arrival. Another rate gives the same requests, only closer together."""
        rng = random.Random(f"traffic {seed}")
        arrivals = _ARRIVALS[self.arrivals](self.requests_per_s, seed)
        new_images = itertools.count(NUM_KNOWN_IMAGES)
        question = lengths(self.prompt_tokens - self.shared_tokens)
        answer = lengths(self.output_tokens)
        for _ in range(num_requests):
            num_images = int(self.pictures) + (rng.random() < self.pictures % 1)
            images = tuple(
                next(new_images) if rng.random() < self.new_pictures else rng.randrange(NUM_KNOWN_IMAGES)
                for _ in range(num_images)
            )
            num_left = max_model_len - self.shared_tokens - num_images * image_tokens
            num_output_tokens = min(answer.draw(rng), max(1, num_left // 2))
            num_new_tokens = max(1, min(question.draw(rng), num_left - num_output_tokens))
            yield Conversation(
                next(arrivals), 0, self.shared_tokens, (Turn(0, num_new_tokens, num_output_tokens, images),)
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """95th percentiles, in seconds.

    ttft_s   from the question to the first token of its answer, pictures and queues included
    gap_s    between two tokens of an answer
    """

    ttft_s: float
    gap_s: float


def lengths(mean: float) -> Lengths:
    """Lognormal with about this mean."""
    return Lengths(round(mean / math.exp(SIGMA**2 / 2)), SIGMA, most=max(1, round(LONGEST * mean)), least=1)
