"""Decides what each step computes. There is no prefill or decode mode: every sequence has uncomputed tokens, one or
many, and each step moves some of them forward within the token budget.

Order within a step: sequences that wait for one token (decodes), then unfinished prompts, then waiting sequences, each
by priority and arrival; last, guesses at how decodes go on (speculation/). Memory pressure preempts the last of the
order; a preempted sequence is recomputed later. Knows nothing of tensors, text or time.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import NamedTuple, Protocol

from services.text_engine.core.batch import Batch, Draft, DraftMethod, SampledToken, ScheduledSequence
from services.text_engine.core.block_manager import BlockManager, CachedPrefix
from services.text_engine.core.prefix_hash import extend_block_hashes
from services.text_engine.core.sequence import ImageSpan, Sequence, SequenceStatus, queue_order
from services.text_engine.core.speculation.interface import DraftCounts, Drafter
from services.text_engine.core.stopping import Finish, check_stop

# Blocks kept free for each running sequence when another one starts: without them the newcomer soon preempts somebody.
GROWTH_BLOCKS = 2


class ImageSource(Protocol):
    """Where the embeddings of images come from; asked before any position of an image is scheduled."""

    def is_ready(self, sequence: Sequence, span: ImageSpan) -> bool:
        """Whether the span's rows can be read now. If not, fetching them starts or goes on."""
        ...


class StepOutput(NamedTuple):
    """One token that a step appended to a sequence, and whether it ended it. A step may append several.

    num_generated_tokens   the sequence's, with this one and without later ones of the same step
    """

    sequence: Sequence
    sampled: SampledToken
    finish: Finish | None
    num_generated_tokens: int


class Scheduler:
    """Continuous batching with chunked prefill, prefix caching and preemption by recompute.

    max_prefill_tokens_while_decoding   what prompts get of a step in which a sequence decodes; None: all that is left.
                                        A bidirectional image that begins in the step may take it beyond that
    drafter                             None: every decode computes one token
    """

    def __init__(
        self,
        blocks: BlockManager,
        images: ImageSource,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        eos_token_ids: AbstractSet[int],
        max_prefill_tokens_while_decoding: int | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {max_num_batched_tokens}, below max_num_seqs ({max_num_seqs}): a step must "
                "have room for one token of every running sequence"
            )
        self.blocks = blocks
        self.images = images
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_prefill_tokens_while_decoding = max_prefill_tokens_while_decoding
        self.eos_token_ids = eos_token_ids
        self.drafter = drafter
        self.draft_counts: dict[DraftMethod, DraftCounts] = defaultdict(DraftCounts)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_starts = 0  # how often a sequence left the queue for a place
        self._arrivals = 0

    @property
    def max_whole_span(self) -> int:
        """Rows of the largest bidirectional image span that is sure to get into one step, whatever else runs."""
        return self.max_num_batched_tokens - self.max_num_seqs + 1

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def num_ahead(self, priority: int) -> int:
        """Waiting sequences that go before one of this priority that came now; who waits for a picture is overtaken.
        From any thread."""
        waiting = list(self.waiting)
        place = bisect.bisect_left(waiting, queue_order(self._arrivals, priority), key=lambda s: s.order)
        return sum(sequence.awaited_image is None for sequence in waiting[:place])

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. It must fit into the pool when it is alone, and its bidirectional images into a step, or it
        would wait for ever."""
        assert 0 < sequence.num_tokens < sequence.max_total_tokens <= self.blocks.max_sequence_tokens + 1
        assert all(s.num_tokens <= self.max_whole_span for s in sequence.images if s.attention == "bidirectional")
        sequence.arrival = self._arrivals
        self._arrivals += 1
        bisect.insort(self.waiting, sequence, key=lambda s: s.order)
        self._request_images(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence at any moment: its blocks are free at once, its published ones stay findable."""
        if sequence.status is SequenceStatus.FINISHED:
            return
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            self.blocks.release(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED

    def take_draft_counts(self) -> dict[DraftMethod, DraftCounts]:
        """What was verified since the last call, by who had guessed it."""
        taken, self.draft_counts = self.draft_counts, defaultdict(DraftCounts)
        return taken

    def schedule(self) -> Batch:
        """Choose this step's tokens. An empty batch means: nothing can run until an image arrives or work is added."""
        step = _Step(self.max_num_batched_tokens)
        for sequence in [s for s in self.running if s.num_uncomputed_tokens == 1]:
            self._schedule_running(step, sequence, 1)
        if step.scheduled and self.max_prefill_tokens_while_decoding is not None:
            step.limit_prompts(self.max_prefill_tokens_while_decoding)
        self._schedule_prompts(step)
        if self.drafter is not None and step.budget > 0:
            self._add_drafts(step, self.drafter)
        return Batch(list(step.scheduled.values()), self.blocks.take_copies() if step.scheduled else [])

    def update(self, batch: Batch, sampled: Iterable[SampledToken]) -> list[StepOutput]:
        """Take in what the step computed: an answer for each scheduled sequence that reached its end."""
        tokens = iter(sampled)
        outputs: list[StepOutput] = []
        for item in batch.scheduled:
            sequence = item.sequence
            token = next(tokens) if item.samples else None
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            if token is None:
                sequence.num_computed_tokens = item.end
                self.blocks.publish_computed(sequence, item.start)
            else:
                outputs += self._append(item, token)
        return outputs

    def _append(self, item: ScheduledSequence, sampled: SampledToken) -> list[StepOutput]:
        """Let a sequence have its new tokens: the drafts that held, up to one that ends it, and the one after them."""
        sequence = item.sequence
        outputs: list[StepOutput] = []
        finish = None
        for token in (*sampled.accepted, sampled):
            if token.error is None:
                sequence.token_ids.append(token.token_id)
                finish = check_stop(sequence, self.eos_token_ids)
            else:
                finish = Finish("abort")
            outputs.append(StepOutput(sequence, token, finish, sequence.num_generated_tokens))
            if finish is not None:
                break
        if item.draft_token_ids:
            self.draft_counts[item.draft_method].note(len(item.draft_token_ids), len(sampled.accepted))
        if sampled.error is None:
            # All but the last: what was computed behind them were guesses that did not hold.
            sequence.num_computed_tokens = sequence.num_tokens - 1
            self.blocks.publish_computed(sequence, item.start)
        else:
            # Whatever broke its logits may be in the keys and values of its earlier chunks, too.
            self.blocks.pool.unpublish(sequence.block_table)
        if finish is not None:
            self.finish(sequence)
        else:
            self.blocks.trim(sequence)
        return outputs

    # --- prompts --------------------------------------------------------------------------------------------------

    def _schedule_prompts(self, step: _Step) -> None:
        """Prefill chunks, oldest first; of what decodes leave of the step, up to a quarter is kept for prompts short
        enough to fit into it, so that a question does not wait behind somebody's book. Where decodes limit prompts
        further it is up to half of that: questions stay as short as they were, and the book gets the other half.
        """
        candidates = [s for s in self.running if s.num_uncomputed_tokens > 1]
        if not step.has_preempted and (len(self.running) < self.max_num_seqs or self._stalled(step)):
            is_ready = self.images.is_ready
            candidates += [
                s
                for s in self.waiting
                if (s.awaited_image is None or is_ready(s, s.awaited_image)) and not s.awaits_another_choice
            ]
        if not candidates:
            return
        most_short = min(step.budget // 4, step.prompt_budget // 2)
        short_tokens = self._short_tokens(step, candidates, most_short)
        num_short_tokens = sum(short_tokens)
        for i, sequence in enumerate(candidates):
            if step.prompt_budget <= 0:
                break
            num_short = short_tokens[i] if i < len(short_tokens) else 0
            num_short_tokens -= num_short
            num_kept = 0 if num_short else min(most_short, num_short_tokens)
            budget = step.prompt_budget - num_kept
            if sequence.status is SequenceStatus.RUNNING:
                self._continue_prompt(step, sequence, budget)
            elif step.has_preempted:
                break  # nobody starts on blocks that were just taken from another
            elif not self._try_start(step, sequence, budget):
                break

    def _short_tokens(self, step: _Step, candidates: list[Sequence], most_short: int) -> list[int]:
        """What each candidate could use if it is short, as far down the queue as this step can come: a thousand waiting
        sequences must not cost every step a look at all of them."""
        num_slots = self.max_num_seqs - len(self.running)
        num_left = step.prompt_budget if most_short > 0 else 0
        found: list[int] = []
        for sequence in candidates:
            if sequence.status is SequenceStatus.WAITING and not sequence.images:
                num_slots -= 1
            if num_slots < 0 or num_left <= 0:
                break
            found.append(self._num_short_tokens(sequence, most_short))
            num_left -= found[-1]
        return found

    def _num_short_tokens(self, sequence: Sequence, limit: int) -> int:
        """What a prompt could use now that has at most `limit` tokens left to compute; nothing for a longer one.

        What the prefix cache holds need not be computed: a new question in a long conversation is short.
        """
        start = sequence.num_computed_tokens
        if sequence.status is SequenceStatus.WAITING:
            start = self.blocks.find_cached_prefix(sequence).num_tokens
        return self._num_ready_tokens(sequence, start) if sequence.num_tokens - start <= limit else 0

    def _continue_prompt(self, step: _Step, sequence: Sequence, budget: int) -> None:
        """The next chunk of an unfinished prompt, unless somebody else has computed it, or is about to."""
        num_saved = self.blocks.adopt_cached(sequence)
        if sequence.num_cached_tokens is not None and sequence.num_preemptions == 0:
            sequence.num_cached_tokens += num_saved
        if not self._is_being_computed(step, sequence, sequence.num_computed_tokens // self.blocks.block_size):
            self._schedule_running(step, sequence, min(budget, sequence.num_uncomputed_tokens))

    def _try_start(self, step: _Step, sequence: Sequence, budget: int) -> bool:
        """Admit a waiting sequence. False: a slot or blocks are short, so nobody behind it may overtake it."""
        prefix = self.blocks.find_cached_prefix(sequence)
        start = prefix.num_tokens
        num_ready_tokens = self._num_ready_tokens(sequence, start)
        sequence.awaited_image = None if num_ready_tokens else sequence.images_between(start, sequence.num_tokens)[0]
        num_new_tokens = min(budget, num_ready_tokens)
        if num_new_tokens <= 0 or self._is_being_computed(step, sequence, len(prefix.blocks)):
            return True
        num_new_tokens = self._without_cuts(step, sequence, start, num_new_tokens)
        if num_new_tokens <= 0:
            return False
        if not self._can_start(sequence, prefix):
            if start + num_ready_tokens < sequence.num_tokens:
                return True  # it would soon wait for an image: those behind it need not
            if not self._displace_stalled(step, sequence, prefix):
                return False
        self.blocks.start(sequence, prefix)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = start
        grown = self.blocks.grow(sequence, start + num_new_tokens)
        assert grown, "can_start promised blocks for the whole sequence"
        self.waiting.remove(sequence)
        self.num_starts += 1
        sequence.status = SequenceStatus.RUNNING
        bisect.insort(self.running, sequence, key=lambda s: s.order)
        self._add_to_step(step, sequence, num_new_tokens)
        return True

    def _can_start(self, sequence: Sequence, prefix: CachedPrefix, leaving: list[Sequence] | None = None) -> bool:
        """Whether there are a slot, and blocks for the whole sequence and for what those that run will soon write.

        leaving   as if these gave their places up
        """
        leaving = leaving or []
        num_staying = len(self.running) - len(leaving)
        num_returned = sum(len(s.block_table) for s in leaving)
        num_free = num_returned - GROWTH_BLOCKS * num_staying
        return num_staying < self.max_num_seqs and self.blocks.can_start(sequence, prefix, num_extra=num_free)

    def _displace_stalled(self, step: _Step, sequence: Sequence, prefix: CachedPrefix) -> bool:
        """Let a sequence that needs nothing but a place have that of sequences that can only wait for an image: nobody
        waits for other people's images. No two change places for ever, since those would not be let in this way."""
        stalled = self._stalled(step)
        if not stalled or not self._can_start(sequence, prefix, leaving=stalled):
            return False
        while stalled and not self._can_start(sequence, prefix):
            self._set_aside(stalled.pop())
        return self._can_start(sequence, prefix)

    def _is_being_computed(self, step: _Step, sequence: Sequence, num_blocks_done: int) -> bool:
        """Whether most of what this sequence still needs is computed in this very step for another one: then it waits
        a step and finds it in the prefix cache (the same new picture asked about by many at once)."""
        block_size = self.blocks.block_size
        if not step.pending_hashes or sequence.max_cached_tokens <= num_blocks_done * block_size:
            return False
        hashes = extend_block_hashes(sequence, block_size)
        num_coming = 0
        while num_blocks_done + num_coming < len(hashes):
            if hashes[num_blocks_done + num_coming] not in step.pending_hashes:
                break
            num_coming += 1
        return 2 * num_coming * block_size > sequence.num_tokens - num_blocks_done * block_size

    # --- running sequences ----------------------------------------------------------------------------------------

    def _schedule_running(self, step: _Step, sequence: Sequence, num_new_tokens: int) -> None:
        if sequence.status is not SequenceStatus.RUNNING:
            return  # preempted earlier in this step
        start = sequence.num_computed_tokens
        if sequence.has_images_from(start):
            num_new_tokens = min(num_new_tokens, self._num_ready_tokens(sequence, start))
            num_new_tokens = self._without_cuts(step, sequence, start, num_new_tokens)
        if num_new_tokens <= 0:
            return
        while not self.blocks.grow(sequence, start + num_new_tokens):
            victim = self._preemption_victim(step)
            self._preempt(step, victim)
            if victim is sequence:
                return
        self._add_to_step(step, sequence, num_new_tokens)

    def _preemption_victim(self, step: _Step) -> Sequence:
        """Who gives up its blocks: one that only waits for an image, else the last in order, in this step or not."""
        stalled = self._stalled(step)
        return stalled[-1] if stalled else self.running[-1]

    def _stalled(self, step: _Step) -> list[Sequence]:
        """Who holds blocks and can do nothing until an image arrives."""
        return [
            sequence
            for sequence in self.running
            if sequence.has_images_from(sequence.num_computed_tokens)
            and sequence not in step.scheduled
            and self._num_ready_tokens(sequence, sequence.num_computed_tokens) == 0
        ]

    def _preempt(self, step: _Step, sequence: Sequence) -> None:
        step.drop(sequence)
        self._set_aside(sequence)

    def _set_aside(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.blocks.release(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        bisect.insort(self.waiting, sequence, key=lambda s: s.order)
        self._request_images(sequence)

    def _add_drafts(self, step: _Step, drafter: Drafter) -> None:
        """Let decodes verify guesses at their next tokens with what is left of the step, last of all: nobody gives up
        a token or a block for a guess."""
        decodes = [item for item in step.scheduled.values() if item.num_new_tokens == 1 and item.samples]
        drafts = drafter.propose(
            [item.sequence for item in decodes],
            num_step_tokens=self.max_num_batched_tokens - step.budget,
            max_draft_tokens=step.budget,
        )
        for sequence, draft in drafts.items():
            item = step.scheduled[sequence]
            assert 0 < len(draft.token_ids) <= sequence.max_draft_tokens
            if self.blocks.grow(sequence, item.end + len(draft.token_ids)):
                step.add_draft(item, draft)

    # --- helpers --------------------------------------------------------------------------------------------------

    def _num_ready_tokens(self, sequence: Sequence, start: int) -> int:
        """Uncomputed tokens up to the first image whose embedding has not arrived."""
        if sequence.has_images_from(start):
            for span in sequence.images_between(start, sequence.num_tokens):
                if not self.images.is_ready(sequence, span):
                    return max(span.start - start, 0)
        return sequence.num_tokens - start

    def _without_cuts(self, step: _Step, sequence: Sequence, start: int, num_new_tokens: int) -> int:
        """The chunk's length so that it cuts no bidirectional image: its rows see each other, so one step computes all.

        The chunk ends before such an image or, if it would begin there, takes of the step's budget what the image
        needs; 0 if the budget has too little left.
        """
        if num_new_tokens <= 0:
            return 0
        end = start + num_new_tokens
        for span in sequence.images_between(start, end):
            if span.attention == "bidirectional" and span.end > end:
                end = span.start if span.start > start else span.end
        return end - start if end - start <= step.budget else 0

    def _request_images(self, sequence: Sequence) -> None:
        """Have the images on their way before the sequence's turn comes; those in the prefix cache are not needed."""
        start = self.blocks.find_cached_prefix(sequence).num_tokens
        for span in sequence.images_between(start, sequence.num_tokens):
            self.images.is_ready(sequence, span)

    def _add_to_step(self, step: _Step, sequence: Sequence, num_new_tokens: int) -> None:
        item = ScheduledSequence(sequence, sequence.num_computed_tokens, num_new_tokens)
        step.add(item)
        if num_new_tokens > 1 and self.blocks.enable_prefix_caching:
            block_size = self.blocks.block_size
            hashes = extend_block_hashes(sequence, block_size)
            step.pending_hashes.update(hashes[item.start // block_size : item.end // block_size])


class _Step:
    """One step while it is put together. pending_hashes: blocks that will be full when it is done.

    budget           tokens that it has room for
    prompt_budget    those of them that prompts may fill
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._num_withheld = 0
        self.scheduled: dict[Sequence, ScheduledSequence] = {}
        self.pending_hashes: set[bytes] = set()
        self.has_preempted = False

    @property
    def prompt_budget(self) -> int:
        return self.budget - self._num_withheld

    def limit_prompts(self, max_tokens: int) -> None:
        self._num_withheld = max(0, self.budget - max_tokens)

    def add(self, item: ScheduledSequence) -> None:
        self.scheduled[item.sequence] = item
        self.budget -= item.num_new_tokens

    def add_draft(self, item: ScheduledSequence, draft: Draft) -> None:
        num_draft_tokens = len(draft.token_ids)
        assert num_draft_tokens <= self.budget
        self.scheduled[item.sequence] = item._replace(
            num_new_tokens=item.num_new_tokens + num_draft_tokens,
            draft_token_ids=tuple(draft.token_ids),
            draft_method=draft.method,
        )
        self.budget -= num_draft_tokens

    def drop(self, sequence: Sequence) -> None:
        self.has_preempted = True
        item = self.scheduled.pop(sequence, None)
        if item is not None:
            self.budget += item.num_new_tokens
