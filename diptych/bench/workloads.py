"""What is asked: the requests of W1 to W5, equal in every run that has the same seed and salt.

Texts are made only of words that are one token each (with their leading space) in the SmolLM2 tokenizer, so that n
words are n tokens to any server of such a checkpoint. W6 and W7 (sessions.py) take words and pictures from here.
"""

from __future__ import annotations

import io
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from diptych.bench.errors import BenchError

WORDS = """time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work government number night point home water
room mother area money story fact month lot right study book eye job word business issue side kind head house
service friend father power hour game line end member law car city community name president team minute idea kid
body information back parent face others level office door health person art war history party result change
morning reason research girl guy moment air teacher force education foot boy age policy music market sense nation
plan college interest death experience effect use class control field development role effort rate heart drug show
leader light voice wife police mind price report decision son view relationship town road arm difference value
building action season society tax director position player record paper space ground form event official matter
center couple site project activity star table need court oil situation cost industry figure street image phone
data picture practice piece land product doctor wall news test movie north love support technology""".split()  # noqa: SIM905 (a list of 250 quoted words reads worse)

IMAGE_WORKLOADS = frozenset({"W4", "W5"})
NUM_IMAGE_REQUESTS = 16
# W5 shows one picture; its seed lies between those of W4's, which count from 0.
W5_IMAGE_OFFSET = 500


@dataclass(frozen=True, slots=True)
class Request:
    """One question: `num_prompt_tokens` counts the words of the text, not the images or the chat template."""

    text: str
    num_prompt_tokens: int
    num_output_tokens: int
    images: tuple[bytes, ...] = ()


def seeded(name: str) -> random.Random:
    """The generator of one workload's words: by name, so that no two workloads share a sequence."""
    return random.Random(name)  # noqa: S311 (repeatable is the point)


def random_words(rng: random.Random, num_words: int) -> str:
    return "".join(" " + rng.choice(WORDS) for _ in range(num_words))


def iter_requests(name: str, seed: int, salt: str = "") -> Iterator[Request]:
    """The requests of workload `name`, made one by one. A salt changes words and pictures, never lengths."""
    if name not in _SHAPES:
        raise BenchError(f"unknown workload {name!r}; there are {', '.join(_SHAPES)}, W6 and W7")
    requests = _unsalted(name, seed)
    if not salt:
        yield from _with_images(requests, name, first_image_seed=(seed + 1) * 1000)
        return
    rng = seeded(f"{name}-{seed}-{salt}")
    salted = (replace(request, text=random_words(rng, request.num_prompt_tokens)) for request in requests)
    yield from _with_images(salted, name, first_image_seed=1_000_000 + zlib.crc32(salt.encode()) + seed * 1000)


def _unsalted(name: str, seed: int) -> Iterator[Request]:
    rng = seeded(f"{name}-{seed}")
    for num_prompt_tokens, num_output_tokens in _SHAPES[name](rng):
        yield Request(random_words(rng, num_prompt_tokens), num_prompt_tokens, num_output_tokens)


def _mixed_lengths(rng: random.Random) -> Iterator[tuple[int, int]]:
    """W2. Drawn from the same generator as the words and in turn with them: the order is part of the workload."""
    for _ in range(64):
        yield rng.randint(32, 512), rng.randint(16, 256)


# workload -> (prompt words, output tokens) of each request
_SHAPES: dict[str, Callable[[random.Random], Iterator[tuple[int, int]]]] = {
    "W1": lambda _rng: iter([(512, 128)] * 32),
    "W2": _mixed_lengths,
    "W3": lambda _rng: iter([(64, 128)]),
    "W4": lambda _rng: iter([(32, 64)] * NUM_IMAGE_REQUESTS),
    "W5": lambda _rng: iter([(32, 64)] * NUM_IMAGE_REQUESTS),
}


def _with_images(requests: Iterator[Request], name: str, *, first_image_seed: int) -> Iterator[Request]:
    if name not in IMAGE_WORKLOADS:
        yield from requests
        return
    one_for_all = draw_image(first_image_seed + W5_IMAGE_OFFSET) if name == "W5" else None
    for index, request in enumerate(requests):
        yield replace(request, images=(one_for_all or draw_image(first_image_seed + index),))


def require_image_packages() -> None:
    """Say at the start, not after half an hour, that pictures cannot be drawn."""
    try:
        import numpy  # noqa: F401
        import PIL  # noqa: F401
    except ImportError as missing:
        raise BenchError(
            f"W4 to W7 draw pictures and {missing.name} is not installed: pip install numpy pillow"
        ) from missing


def draw_image(seed: int, width: int = 640, height: int = 480) -> bytes:
    """A JPEG with waves, six blocks and noise: as hard to decode as a photo, unlike any other seed's."""
    import numpy as np  # late: a text workload needs neither numpy nor pillow
    from PIL import Image

    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    pixels = np.zeros((height, width, 3), np.float32)
    for channel in range(3):
        slope_x, slope_y = rng.uniform(-1, 1), rng.uniform(-1, 1)
        phase, frequency = rng.uniform(0, 6.28), rng.uniform(0.005, 0.05)
        pixels[..., channel] = 127 + 90 * np.sin(frequency * (slope_x * x + slope_y * y) + phase)
    for _ in range(6):
        left, top = rng.integers(0, width - 80), rng.integers(0, height - 80)
        colour = rng.uniform(0, 255, 3)
        block_height, block_width = rng.integers(20, 80), rng.integers(20, 80)
        pixels[top : top + block_height, left : left + block_width] = colour
    pixels += rng.normal(0, 12, pixels.shape)
    jpeg = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype("uint8")).save(jpeg, "JPEG", quality=85)
    return jpeg.getvalue()
