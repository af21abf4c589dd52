"""Puts image rows where the placeholders stand in the merged token stream."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from services.text_engine.core.batch import Batch


class EmbeddingReader(Protocol):
    def rows(self, image_key: str) -> torch.Tensor:
        """One image's embedding, [num_tokens, row_size]; it was ready when the batch was scheduled."""
        ...


# hidden [num_tokens, dim], rows [num_rows, dim], token_index and row_index [num_rows] int64: see kernels.merge_rows
MergeRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def merge_image_rows(
    hidden: torch.Tensor, batch: Batch, embeddings: EmbeddingReader, merge_rows: MergeRows | None = None
) -> None:
    """Overwrite the placeholder rows of `hidden` [num_tokens, row_size] with the images' own, in place.

    A chunk may begin or end inside an image: exactly the rows of its positions are taken, so that over all chunks each
    row is used once and in order.

    merge_rows  does it on the device in one go, without the host waiting; None: piece by piece
    """
    pieces = list(_pieces(batch, embeddings))
    if merge_rows is None:
        for target, rows in pieces:
            hidden[target] = rows.to(hidden.device, hidden.dtype)
    elif pieces:
        is_remote = hidden.device.type != "cpu"
        rows = _joined([rows for _, rows in pieces], pin_memory=is_remote)
        token_index = torch.cat([torch.arange(target.start, target.stop) for target, _ in pieces])
        # The index of rows is 0, 1, …: both indices travel as one.
        index = torch.stack((token_index, torch.arange(len(rows))))
        if is_remote:
            rows = rows.to(hidden.device, non_blocking=True)
            index = index.pin_memory().to(hidden.device, non_blocking=True)
        merge_rows(hidden, rows, index[0], index[1])


def _pieces(batch: Batch, embeddings: EmbeddingReader) -> Iterator[tuple[slice, torch.Tensor]]:
    """Rows of the batch, and the images' rows that belong there."""
    first_row = 0
    for item in batch.scheduled:
        for span in item.sequence.images_between(item.start, item.end):
            begin, end = max(span.start, item.start), min(span.end, item.end)
            rows = embeddings.rows(span.image_key)[span.rows(begin, end)]
            yield slice(first_row + begin - item.start, first_row + end - item.start), rows
        first_row += item.num_new_tokens


def _joined(rows: list[torch.Tensor], *, pin_memory: bool) -> torch.Tensor:
    """All rows one after another on the host."""
    num_rows = sum(len(each) for each in rows)
    dtype = functools.reduce(torch.promote_types, (each.dtype for each in rows))
    joined = torch.empty((num_rows, rows[0].shape[1]), dtype=dtype, pin_memory=pin_memory)
    return torch.cat([each.to(dtype) for each in rows], out=joined)
