"""Puts image rows where the placeholders stand in the merged token stream."""

from __future__ import annotations

from typing import Protocol

import torch

from services.text_engine.core.batch import Batch


class EmbeddingReader(Protocol):
    def rows(self, image_key: str) -> torch.Tensor:
        """One image's embedding, [num_tokens, hidden_size]; it was ready when the batch was scheduled."""
        ...


def merge_image_rows(hidden: torch.Tensor, batch: Batch, embeddings: EmbeddingReader) -> None:
    """Overwrite the placeholder rows of `hidden` [num_tokens, hidden_size] with the images' own, in place.

    A chunk may begin or end inside an image: exactly the rows of its positions are taken, so that over all chunks each
    row is used once and in order.
    """
    first_row = 0
    for item in batch.scheduled:
        for span in item.sequence.images_between(item.start, item.end):
            begin, end = max(span.start, item.start), min(span.end, item.end)
            rows = embeddings.rows(span.image_key)[begin - span.start : end - span.start]
            target = slice(first_row + begin - item.start, first_row + end - item.start)
            hidden[target] = rows.to(hidden.device, hidden.dtype)
        first_row += item.num_new_tokens
