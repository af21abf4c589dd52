"""Embeddings that a client computed itself, in place of a picture.

A safetensors file with one tensor, `image_embeds` [num_tokens, row_size]. Its metadata may say `width`, `height` and
`detail` of the picture; only models whose pictures differ in their number of rows need them.

Nothing is unpickled. What is read here goes on as if the tower had computed it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from shared.errors import InvalidEmbedding
from shared.wire.encoder import ImageSize
from shared.wire.images import ImageMetadata

TENSOR: Final = "image_embeds"
DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
_HEADER_SIZE_BYTES: Final = 8


class GivenEmbedding(NamedTuple):
    metadata: ImageMetadata
    rows: Tensor


def read_embedding(
    data: bytes, *, row_size: int, dtype: torch.dtype, describe: Callable[[ImageSize], ImageMetadata]
) -> GivenEmbedding:
    """The rows, in the encoder's dtype. Raises InvalidEmbedding saying what was given and what is wanted.

    describe   how a picture of a size stands in a prompt
    """
    rows = _tensor(data)
    if rows.dtype not in DTYPES:
        raise InvalidEmbedding(f"{TENSOR} is of {_name(rows.dtype)}; give float32, float16 or bfloat16")
    if rows.dim() != 2 or rows.shape[1] != row_size:
        raise InvalidEmbedding(f"{TENSOR} has the shape {list(rows.shape)}; this model takes [rows, {row_size}]")
    metadata = describe(_size(data))
    if len(rows) != metadata.num_tokens:
        raise InvalidEmbedding(
            f"{TENSOR} has {len(rows)} rows; a picture of {metadata.width} x {metadata.height} pixels has "
            f"{metadata.num_tokens}. Say width, height and detail of the picture in the file's metadata"
        )
    rows = rows.to(dtype)
    if not bool(torch.isfinite(rows).all()):
        raise InvalidEmbedding(f"{TENSOR} holds values that are not finite in {_name(dtype)}")
    return GivenEmbedding(metadata, rows)


def _tensor(data: bytes) -> Tensor:
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, AttributeError, TypeError, OverflowError, RuntimeError) as error:
        # The library checks offsets, not what torch takes: [2**64 - 1, 0] has no bytes and is no shape. torch adds its
        # own stack to what it says.
        reason = str(error).partition("\n")[0]
        raise InvalidEmbedding(
            f"these bytes are no safetensors file ({reason}); write one with safetensors.torch.save, not torch.save"
        ) from None
    if set(tensors) != {TENSOR}:
        raise InvalidEmbedding(f"the file holds {sorted(tensors)[:8]}; give one tensor called {TENSOR}")
    return tensors[TENSOR]


def _size(data: bytes) -> ImageSize:
    """What the metadata says; without it a picture of one pixel, as good as any where all have as many rows."""
    end = _HEADER_SIZE_BYTES + int.from_bytes(data[:_HEADER_SIZE_BYTES], "little")
    metadata = json.loads(data[_HEADER_SIZE_BYTES:end]).get("__metadata__") or {}
    try:
        return ImageSize(
            width=int(metadata.get("width", 1)),
            height=int(metadata.get("height", 1)),
            detail=metadata.get("detail", "auto"),
        )
    except (ValueError, ValidationError):
        raise InvalidEmbedding(
            "the file's metadata must hold width and height as whole numbers above 0, and detail as low, high or auto"
        ) from None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
