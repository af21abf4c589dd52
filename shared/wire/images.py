"""An image once it has been seen: a name and its place in a prompt. All three services pass these on; the encoder alone
makes them.
"""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from shared.wire.common import WireModel

# Ten times what the largest admitted picture has. Whatever claims more is damaged, and would fill a prompt's memory.
MAX_IMAGE_TOKENS = 1 << 20
Attention = Literal["causal", "bidirectional"]
Detail = Literal["low", "high"]  # how a picture is read: as cheaply as the model can, or as it does by default
RequestedDetail = Literal["low", "high", "auto"]


class ImageMetadata(WireModel):
    """How one image stands in a prompt. The encoder announces it, so that a text engine knows no vision family.

    num_tokens      rows of the embedding
    width, height   of the upright picture
    layout          what takes the place of the image's mark, in order: a number is that many positions, filled by the
                    next rows of the embedding; a string is text, special tokens' spellings counting, between them.
                    Empty: the rows alone
    grid            (frames, lines, columns) whose cells the rows are, for rotary positions in three dimensions; None:
                    the rows are counted like text
    attention       "bidirectional": each row of a run sees the whole run
    """

    num_tokens: int = Field(gt=0, le=MAX_IMAGE_TOKENS)
    width: PositiveInt
    height: PositiveInt
    layout: tuple[str | PositiveInt, ...] = ()
    grid: tuple[PositiveInt, PositiveInt, PositiveInt] | None = None
    attention: Attention = "causal"

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        num_laid_out = sum(piece for piece in self.pieces if isinstance(piece, int))
        if num_laid_out != self.num_tokens:
            raise ValueError(f"the layout has room for {num_laid_out} rows; num_tokens is {self.num_tokens}")
        if self.grid is not None and math.prod(self.grid) != self.num_tokens:
            raise ValueError(f"a grid of {self.grid} has not {self.num_tokens} cells")
        return self

    @property
    def pieces(self) -> tuple[str | int, ...]:
        return self.layout or (self.num_tokens,)


class ImageRef(ImageMetadata):
    """Stands for one image from here on: where its embedding is, and how it stands in the prompt.

    encoder_url   base URL of the encoder that admitted the image and can serve `GET /v1/embeddings/{image_key}`;
                  None if the embedding was found in the cache and no encoder was asked
    """

    image_key: str = Field(pattern=r"^[0-9a-f]{64}$")
    encoder_url: str | None = None

    @classmethod
    def of(cls, metadata: ImageMetadata, *, image_key: str, encoder_url: str | None = None) -> Self:
        return cls(image_key=image_key, encoder_url=encoder_url, **metadata.model_dump())
