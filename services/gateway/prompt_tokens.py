"""A prompt in its own answer: its text before the answer's (`echo`) and its tokens' log-probabilities, as OpenAI's
completions had them and as vLLM has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.gateway.answers import Choice
from services.gateway.schema import CompletionRequest
from services.gateway.streaming import completion_logprobs
from shared.sampling import SamplingParams
from shared.wire.engine import PromptToken, Started, Tokens


def prompt_logprobs_body(tokens: Sequence[PromptToken], num_top: int) -> list[dict[str, Any] | None]:
    """vLLM's shape: for each token an object from ids to log-probabilities, the token's own first, then the best.

    null for the first token, which nothing stands before, and for positions of images, which are no text.
    """
    return [None if token.logprob is None else _entry(token, num_top) for token in tokens]


def _entry(token: PromptToken, num_top: int) -> dict[str, Any]:
    own = {"logprob": token.logprob, "rank": token.rank, "decoded_token": token.token}
    entry: dict[str, dict[str, Any]] = {str(token.token_id): own}
    for rank, best in enumerate(token.top[:num_top], start=1):
        named = {"logprob": best.logprob, "rank": rank, "decoded_token": best.token}
        entry.setdefault(str(best.token_id), named)
    return entry


class PromptScores:
    """What an answer says of one prompt, made as its portions arrive: of plain dicts of numbers a long prompt's weigh a
    fraction of what the events do, and the garbage collector does not walk through them."""

    def __init__(self, body: CompletionRequest) -> None:
        self._num_top = body.prompt_logprobs
        self._num_echoed = body.logprobs if body.echo else None
        self.entries: list[dict[str, Any] | None] = []
        self.echoed: list[PromptToken] = []

    def add(self, portion: Sequence[PromptToken]) -> None:
        if self._num_top is not None:
            self.entries += prompt_logprobs_body(portion, self._num_top)
        if self._num_echoed is not None:
            self.echoed += [token.model_copy(update={"top": token.top[: self._num_echoed]}) for token in portion]


def completion_choice(
    choice: Choice, index: int, body: CompletionRequest, prompt_text: str, scores: PromptScores
) -> dict[str, Any]:
    """One choice of a whole answer, with what was asked for of its prompt."""
    if body.only_echoes:
        choice = Choice(finish_reason="length")
    answer = choice.to_completion(index)
    if body.echo:
        answer["text"] = prompt_text + choice.text
        if body.logprobs is not None:
            answer["logprobs"] = completion_logprobs([*scores.echoed, *(choice.logprobs or [])], 0)
    if body.prompt_logprobs is not None:
        answer["prompt_logprobs"] = scores.entries
    return answer


class ScoreLimit:
    """Keeps what one request has scored of all its prompts within bounds, before any of it is here to fill memory."""

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling
        self._num_prompt_tokens: dict[int, int] = {}

    def add(self, index: int, started: Started) -> None:
        """An engine has taken the prompt with this index. Raises InvalidRequest."""
        self._num_prompt_tokens[index] = started.num_prompt_tokens
        # Each choice repeats what is said of its prompt.
        self._sampling.check_prompt_logprobs(self._sampling.n * sum(self._num_prompt_tokens.values()))


class Echo:
    """Puts the prompt's text before the first text of each choice of a stream."""

    def __init__(self, body: CompletionRequest) -> None:
        self._body = body
        self._begun: set[int] = set()

    def applied_to(self, event: Tokens, index: int, prompt_text: str | None) -> Tokens:
        """index   of the choice among those of all prompts"""
        if not self._body.echo:
            return event
        if self._body.only_echoes:
            event = event.model_copy(update={"text": "", "finish_reason": "length", "stop_reason": None})
        if index in self._begun:
            return event
        self._begun.add(index)
        return event.model_copy(update={"text": (prompt_text or "") + event.text})
