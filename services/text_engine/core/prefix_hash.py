"""Chain hashes of KV blocks: two blocks share a hash only if everything that shaped their keys and values is equal.

A block's hash covers its parent's hash (hence every token before it), its token ids and, for each image position, which
image and which rows of it stand there: placeholder ids alone would let one picture answer for another. The first
block's parent covers what all of them depend on: the salt and the LoRA adapter.
"""

from __future__ import annotations

from array import array

from services.text_engine.core.sequence import Sequence
from shared.hashing import digest


def extend_block_hashes(sequence: Sequence, block_size: int) -> list[bytes]:
    """Bring `sequence.block_hashes` up to its last full block and return it."""
    hashes = sequence.block_hashes
    num_full = sequence.num_tokens // block_size
    while len(hashes) < num_full:
        start = len(hashes) * block_size
        parent = hashes[-1] if hashes else digest(b"root", sequence.cache_salt, sequence.adapter_key)
        hashes.append(_block_hash(sequence, parent, start, start + block_size))
    return hashes


def _block_hash(sequence: Sequence, parent: bytes, start: int, end: int) -> bytes:
    parts = [parent, array("q", sequence.token_ids[start:end]).tobytes()]
    for span in sequence.images_between(start, end):
        first_position, end_position = max(start, span.start), min(end, span.end)
        rows = span.rows(first_position, end_position)
        parts += [
            span.image_key.encode(),
            (first_position - start).to_bytes(4, "big"),
            rows.start.to_bytes(4, "big"),
            (rows.stop - rows.start).to_bytes(4, "big"),
        ]
    return digest(*parts)
