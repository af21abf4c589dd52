"""Which of the KV cache's blocks a draft model's cache also holds. It has the same block numbers, but fills a block
later than the target does, or never: what the prefix cache gives to a sequence may be unknown to it.
"""

from __future__ import annotations

from services.text_engine.core.prefix_hash import extend_block_hashes
from services.text_engine.core.sequence import Sequence
from services.text_engine.core.speculation.draft_progress import DraftProgress


class DraftedBlocks:
    """For each block the chain hash of the tokens that the draft model computed in all of it.

    A block that was given to other tokens since has another hash, so nobody has to say that it was reused.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._contents: dict[int, bytes] = {}

    def look(self, sequence: Sequence, progress: DraftProgress) -> None:
        """Bring `num_computed` up to date: down after a preemption, up by what was computed for other sequences. Never
        to the last token: there would be nothing to guess from."""
        if progress.num_preemptions != sequence.num_preemptions:
            progress.num_preemptions = sequence.num_preemptions
            progress.num_computed = progress.num_noted = 0
        index = progress.num_computed // self._block_size
        last = (sequence.num_tokens - 1) // self._block_size
        if index == last:
            return
        hashes = extend_block_hashes(sequence, self._block_size)
        while index < last and self._contents.get(sequence.block_table[index]) == hashes[index]:
            index += 1
            progress.num_computed = index * self._block_size

    def note_written(self, sequence: Sequence, progress: DraftProgress, start: int) -> None:
        """Positions from `start` on were written: with its own tokens up to `num_computed`, then with guesses."""
        end = progress.num_computed + max(0, len(progress.guesses) - 1)
        for block in sequence.block_table[start // self._block_size : -(-end // self._block_size)]:
            self._contents.pop(block, None)
        hashes = extend_block_hashes(sequence, self._block_size)
        num_whole = progress.num_computed // self._block_size
        for index in range(min(progress.num_noted, start // self._block_size), num_whole):
            self._contents[sequence.block_table[index]] = hashes[index]
        progress.num_noted = num_whole
