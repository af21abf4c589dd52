"""Which guesses at coming tokens a step verifies: those with which it makes more tokens a second than without.

A draft of k tokens makes a decode row 1 + k tokens long. How many of them hold is what the row's logits say; see
runner/acceptance.py. Here is decided, from how good a sequence's guesses have been and from what a longer step costs on
this machine, how many are worth it: none where weights are read for many rows anyway and arithmetic is what takes time.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as AbstractSequence
from typing import Final, NamedTuple

from services.text_engine.core.batch import Draft, DraftMethod
from services.text_engine.core.sequence import Sequence
from services.text_engine.core.speculation.step_costs import StepCosts

# More rows than this take no guesses: their steps are longer than those of one row that were measured, by what
# attention reads for each. With 32 rows guessing made 23 % fewer tokens a second on two cores; with 8, as many or more.
MAX_GUESSING_ROWS: Final = 8
CAUTION: Final = 0.9  # what an expected token counts beside a certain one: costs and chances are estimates


class UndraftedStep(NamedTuple):
    """A step as it is without drafts.

    num_decodes       tokens that it makes, one for each row that decodes
    num_tokens        that it computes
    max_draft_tokens  that may join them, of all drafts together
    """

    num_decodes: int
    num_tokens: int
    max_draft_tokens: int


class Guess(NamedTuple):
    """Tokens that a sequence may go on with.

    chances   for each of them, the probability that it and all before it hold; so they never rise
    """

    token_ids: list[int]
    chances: list[float]
    method: DraftMethod


class Choice(NamedTuple):
    """How much of each of some drafts a step verifies.

    num_expected   tokens that it then makes
    num_tokens     that it computes
    tokens_per_s   the rate
    """

    lengths: list[int]
    num_expected: float
    num_tokens: int
    tokens_per_s: float


def could_pay(costs: StepCosts, step: UndraftedStep) -> bool:
    """Whether one more token, sure to hold, would make more tokens a second of a step; never for many rows."""
    if not 0 < step.num_decodes <= MAX_GUESSING_ROWS:
        return False
    without = step.num_decodes / costs.seconds(step.num_tokens)
    return (step.num_decodes + CAUTION) / costs.seconds(step.num_tokens + 1) > without


def choose_drafts(guesses: Mapping[Sequence, Guess], costs: StepCosts, step: UndraftedStep) -> dict[Sequence, Draft]:
    """Of each guess as much as is worth verifying."""
    choice = choose([guess.chances for guess in guesses.values()], costs, step)
    return {
        sequence: Draft(guess.token_ids[:length], guess.method)
        for (sequence, guess), length in zip(guesses.items(), choice.lengths, strict=True)
        if length
    }


def choose(chances: AbstractSequence[AbstractSequence[float]], costs: StepCosts, step: UndraftedStep) -> Choice:
    """How much of each draft makes the most tokens a second of a step; 0 of all if that is without any.

    chances   of each draft's tokens; see `Guess`
    """
    # The likeliest token first. The sort is stable and chances never rise: a draft's tokens stay in their order.
    candidates = sorted(
        ((chance, i) for i, draft_chances in enumerate(chances) for chance in draft_chances),
        key=lambda candidate: -candidate[0],
    )[: step.max_draft_tokens]
    expected = float(step.num_decodes)
    best = Choice([], expected, step.num_tokens, expected / costs.seconds(step.num_tokens))
    for num_tokens, (chance, _) in enumerate(candidates, start=step.num_tokens + 1):
        expected += CAUTION * chance
        rate = expected / costs.seconds(num_tokens)
        if rate > best.tokens_per_s:
            best = Choice([], expected, num_tokens, rate)
    lengths = [0] * len(chances)
    for _, i in candidates[: best.num_tokens - step.num_tokens]:
        lengths[i] += 1
    return best._replace(lengths=lengths)
