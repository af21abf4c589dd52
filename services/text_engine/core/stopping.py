"""When a sequence ends because of its tokens. Stop strings need text and are the detokenizer's business."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

from services.text_engine.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a choice ended. `stop_reason`: the stop token id or stop string, None for end-of-sequence and length.

    text_excludes_last   the last token stopped the sequence and is no part of its text
    """

    reason: Literal["stop", "length", "abort"]
    stop_reason: int | str | None = None
    text_excludes_last: bool = False


def check_stop(sequence: Sequence, eos_token_ids: AbstractSet[int]) -> Finish | None:
    """Look at the token just appended. An end token within the budget is a stop even if it is the last allowed one."""
    sampling = sequence.sampling
    last = sequence.token_ids[-1]
    if sequence.num_generated_tokens > sampling.min_tokens:
        if not sampling.ignore_eos and last in eos_token_ids:
            return Finish("stop", text_excludes_last=True)
        if last in sampling.stop_token_ids:
            return Finish("stop", stop_reason=last, text_excludes_last=True)
    if sequence.num_tokens >= sequence.max_total_tokens:
        return Finish("length")
    return None
