"""What a model family must offer, and the fingerprint that names everything its embeddings depend on.

A family answers two questions with one rule, so that they cannot disagree: how an image will stand in the prompt, from
its size alone, and which rows stand there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor, nn

from services.vision_encoder.preprocessing.interface import Preprocessing
from services.vision_encoder.preprocessing.registry import to_json
from shared.cuda_capture import Capture
from shared.hashing import digest
from shared.torch_io import dtype_name
from shared.wire.images import Detail, ImageMetadata

# "Low detail" where a picture may have any size: within so many pixels squared, as OpenAI defines it.
LOW_DETAIL_SIDE: Final = 512

# Raise when a change of our code changes embeddings: keys of older versions are then never read again.
CODE_SCHEME: Final = b"diptych-encoder-v1"


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """An image as the family's preprocessing left it.

    pixels          8-bit [num_tiles, 3, height, width]
    width, height   of the upright picture that the tiles were made of
    detail          which of the model's readings it was made for
    """

    pixels: Tensor
    width: int
    height: int
    detail: Detail = "high"


class Family(Protocol):
    """One loaded model. `prepare_weights` once, then `encode` from one thread.

    Where a model can read a picture more cheaply, that reading is a family of its own over the same weights.
    """

    @property
    def low_detail(self) -> Family | None:
        """The cheapest reading, for pictures of detail "low"; None: there is one reading. Ask when weights are
        prepared."""
        ...

    @property
    def reads_several_in_low_detail(self) -> bool:
        """A conversation with more than one picture was trained on in low detail."""
        ...

    @property
    def tower(self) -> nn.Module:
        """The ViT, `layers` in it: a `towers.VisionTower` or a `rotary_tower.RotaryTower`."""
        ...

    @property
    def preprocessing(self) -> Preprocessing: ...

    @property
    def hidden_size(self) -> int:
        """The text model's."""
        ...

    @property
    def num_row_parts(self) -> int:
        """How many vectors of `hidden_size` a row holds side by side: one, and one for each of the text model's layers
        that a picture is added to again (DeepStack)."""
        ...

    def describe(self, width: int, height: int) -> ImageMetadata:
        """How an upright image of this size stands in a prompt, and how many rows it becomes: from its header alone."""
        ...

    def fingerprint(self, dtype: torch.dtype, background: tuple[int, int, int]) -> str:
        """Hex digest over everything but the image that changes an embedding."""
        ...

    def prepare_weights(self, device: torch.device, dtype: torch.dtype) -> None: ...

    def record_graphs(self, capture: Capture) -> None:
        """Have passes replay as graphs from now on, where all pictures are of one size."""
        ...

    def encode(self, images: Sequence[PreparedImage]) -> list[Tensor]:
        """Per image [num_tokens, num_row_parts * hidden_size], as many rows as `describe` announced; all pixels are of
        one shape."""
        ...


def fingerprint(
    *,
    weights_digest: bytes,
    preprocessing: Preprocessing,
    choices: Mapping[str, object],
    dtype: torch.dtype,
    background: tuple[int, int, int],
) -> str:
    """choices   whatever of the model's config changes its rows and is not in the weights"""
    rest = json.dumps({**choices, "dtype": dtype_name(dtype), "background": background}, sort_keys=True)
    return digest(CODE_SCHEME, weights_digest, rest.encode(), to_json(preprocessing).encode()).hex()
