"""SamplingParams: how to choose tokens and when to stop, with every range checked once.

Names, defaults and ranges are OpenAI's and vLLM's. Violations raise `InvalidRequest` naming the field, so the same
check serves the HTTP gateway, the engine's own API and the offline `LLM`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from shared.errors import InvalidRequest

ConstraintKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]
CONSTRAINT_KINDS: Final[tuple[str, ...]] = get_args(ConstraintKind)
MAX_CONSTRAINT_CHARS = 2**18
MAX_TOP_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 200_000  # in one answer, all its prompts together: some 20 MB of JSON
MAX_STOP_STRINGS = 16
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 200
MAX_CHOICES = 16
MAX_SEED = 2**63 - 1
# Field -> the least and the most that is allowed, None for no limit. The gateway's OpenAPI document tells them, too.
WHOLE_RANGES: Final[dict[str, tuple[int, int | None]]] = {
    "n": (1, MAX_CHOICES),
    "max_tokens": (1, None),
    "min_tokens": (0, None),
    "top_k": (-1, None),
    "seed": (-MAX_SEED, MAX_SEED),
}
REAL_RANGES: Final[dict[str, tuple[float, float]]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 10.0),
}
_MAY_BE_NONE: Final = ("max_tokens", "seed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """What an answer must look like, whatever the model would rather say.

    kind    json_object: any JSON object; json_schema, regex, grammar (Lark or GBNF), choice: as `value` says
    value   the schema as JSON text, the pattern, the grammar, the choices as a JSON list of strings; "" for json_object
    param   the client's field that asked for it: what a refusal names
    """

    kind: ConstraintKind
    value: str = ""
    param: str = "constraint"

    def __post_init__(self) -> None:
        if self.kind not in CONSTRAINT_KINDS:
            raise InvalidRequest(f"a constraint's kind is one of {', '.join(CONSTRAINT_KINDS)}", param=self.param)
        if not isinstance(self.value, str) or bool(self.value) == (self.kind == "json_object"):
            wanted = "no value" if self.kind == "json_object" else "a value that is a text, and not an empty one"
            raise InvalidRequest(f"a constraint of kind {self.kind} takes {wanted}", param=self.param)
        if len(self.value) > MAX_CONSTRAINT_CHARS:
            raise InvalidRequest(
                f"{self.param} has {len(self.value)} characters; at most {MAX_CONSTRAINT_CHARS}", param=self.param
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to generate one request's choices.

    max_tokens          at least 1; None: as many as the context still holds
    temperature         0 is greedy; [0, 2]
    top_p, min_p        [0, 1]; top_p = 0 keeps the single best token
    top_k               0 or -1: off
    repetition_penalty  [0.01, 10]; over prompt and output text tokens, image placeholders excluded
    logit_bias          token id -> [-100, 100]
    allowed_token_ids   no other token comes, end-of-sequence neither; empty: all may
    bad_words           texts whose tokens never come in a row; other spellings in tokens are not caught
    logprobs            None: none; k: the sampled token's and the k best tokens' log-probabilities
    prompt_logprobs     the same for the tokens of the prompt, each given those before it
    extra_args          for the operator's logits processors: the name of one -> its arguments
    min_tokens          no end-of-sequence or stop token before this many tokens
    constraint          the answer must match it; end-of-sequence is allowed only where it is complete. `stop` strings
                        still cut it: they are the client's own wish
    skip_special_tokens whether special tokens leave no trace in the text
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    extra_args: dict[str, Any] = field(default_factory=dict)
    constraint: Constraint | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, (least, most) in WHOLE_RANGES.items():
            if getattr(self, name) is not None or name not in _MAY_BE_NONE:
                _whole(name, getattr(self, name), least, most)
        for name, (low, high) in REAL_RANGES.items():
            _real(name, getattr(self, name), low, high)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens} but max_tokens is only {self.max_tokens}", param="min_tokens"
            )
        for token_id, bias in self.logit_bias.items():
            _whole(f"logit_bias key {token_id!r}", token_id, 0, None, param="logit_bias")
            _real(f"logit_bias[{token_id}]", bias, -100.0, 100.0, param="logit_bias")
        _tuple("stop", self.stop)
        _tuple("stop_token_ids", self.stop_token_ids)
        _tuple("allowed_token_ids", self.allowed_token_ids)
        _tuple("bad_words", self.bad_words)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS}", param="stop")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequest(f"stop holds {text!r}; a stop string needs at least one character", param="stop")
        for token_id in self.stop_token_ids:
            _whole("stop_token_ids", token_id, 0, None)
        for token_id in self.allowed_token_ids:
            _whole("allowed_token_ids", token_id, 0, None)
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidRequest(
                f"bad_words has {len(self.bad_words)} words; at most {MAX_BAD_WORDS}", param="bad_words"
            )
        for word in self.bad_words:
            if not isinstance(word, str) or not 0 < len(word) <= MAX_BAD_WORD_CHARS:
                shown = repr(word) if len(repr(word)) < 80 else f"a text of {len(word)} characters"
                raise InvalidRequest(
                    f"bad_words holds {shown}; a word has 1 to {MAX_BAD_WORD_CHARS} characters", param="bad_words"
                )
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        if self.prompt_logprobs is not None:
            _whole("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_LOGPROBS)
        if not isinstance(self.extra_args, dict):
            raise InvalidRequest("extra_args is an object from logits processors to arguments", param="extra_args")

    def check_prompt_logprobs(self, num_prompt_tokens: int) -> None:
        """Raises InvalidRequest if so long a prompt has too many: each is an object until the answer is sent."""
        if self.prompt_logprobs is None:
            return
        num_logprobs = num_prompt_tokens * (1 + self.prompt_logprobs)
        if num_logprobs > MAX_PROMPT_LOGPROBS:
            raise InvalidRequest(
                f"{1 + self.prompt_logprobs} log-probabilities of each of {num_prompt_tokens} prompt tokens are "
                f"{num_logprobs}; one answer has room for {MAX_PROMPT_LOGPROBS}, all its prompts and choices together: "
                "ask for fewer of each token, or score less text at a time",
                param="prompt_logprobs",
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1 or self.top_p == 0.0

    @property
    def needs_token_counts(self) -> bool:
        """Whether any penalty looks at the tokens so far."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


def _whole(name: str, value: object, low: int, high: int | None, *, param: str | None = None) -> None:
    allowed = f"at least {low}" if high is None else f"from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} is {value!r}; it must be a whole number {allowed}", param=param or name)
    if value < low or (high is not None and value > high):
        raise InvalidRequest(f"{name} is {value}; it must be {allowed}", param=param or name)


def _tuple(name: str, value: object) -> None:
    """A lone string would pass for a sequence of one-letter strings."""
    if not isinstance(value, (tuple, list)):
        raise InvalidRequest(f"{name} is {value!r}; give a list", param=name)


def _real(name: str, value: object, low: float, high: float, *, param: str | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequest(f"{name} is {value!r}; it must be a number from {low} to {high}", param=param or name)
    if not low <= value <= high:  # false for NaN and infinities, too
        shown = value if isinstance(value, float) or abs(value) < MAX_SEED else "a huge number"
        raise InvalidRequest(f"{name} is {shown}; it must be from {low} to {high}", param=param or name)
