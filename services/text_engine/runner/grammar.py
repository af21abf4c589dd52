"""Constraints as token masks, on the llguidance library: compiled once per constraint, followed once per sequence.

A sequence's next mask is computed in a worker thread from the moment its last token is known, while the model runs;
the library lets go of the interpreter meanwhile. Text is constrained, not tokens: a valid answer may be spelled in any
way.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from, regex_to_lark
from numpy.typing import NDArray

from services.text_engine.tokenizer import Tokenizer
from shared.errors import InvalidRequest
from shared.reasoning import ReasoningMarks, ReasoningStart
from shared.sampling import Constraint

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # a name of the library's stubs only

MAX_COMPILED = 128
MAX_ERROR_CHARS = 300
# Between the signs of JSON: nothing, one space, or a new line and its indentation. The library's default lets a model
# that has lost its way emit white space until max_tokens.
_JSON_STYLE: Final[JsonCompileOptions] = {"whitespace_pattern": r"(\n {0,32}| )"}
_LIMITS: Final = LLParserLimits(verbose_errors=False)


@dataclass(frozen=True, slots=True)
class _Allowed:
    """Which tokens may come next, [vocab]; if none may, why."""

    mask: NDArray[np.bool_]
    problem: str | None

    @classmethod
    def by(cls, matcher: LLMatcher, vocab_size: int) -> _Allowed:
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        mask = np.unpackbits(bits, count=vocab_size, bitorder="little").view(np.bool_)
        if matcher.is_error():
            return cls(np.zeros_like(mask), f"the grammar cannot be followed: {_short(matcher.get_error())}")
        return cls(mask, None if mask.any() else "no token of this model's vocabulary can go on as the grammar demands")


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A matcher at the beginning, only ever copied, and what may come first."""

    matcher: LLMatcher
    first: _Allowed


class GrammarMatcher:
    """Follows one sequence through its grammar. `accept` and `allowed` take turns, in one thread.

    An end-of-sequence token leaves the state as it is: it adds no text.
    """

    def __init__(self, compiled: _Compiled, end_ids: AbstractSet[int], workers: ThreadPoolExecutor) -> None:
        self._matcher = compiled.matcher.deep_copy()
        self._vocab_size = compiled.first.mask.size
        self._end_ids = end_ids
        self._workers = workers
        self._next: Future[_Allowed] = Future()
        self._next.set_result(compiled.first)

    def allowed(self) -> NDArray[np.bool_]:
        """[vocab]; which tokens may come next. All False if and only if there is a `problem`."""
        return self._next.result().mask

    @property
    def problem(self) -> str | None:
        """Why the answer cannot go on: the grammar turned out too complex, or the vocabulary cannot spell it."""
        return self._next.result().problem

    def accept(self, token_id: int) -> None:
        """Take in the sequence's next token, which was allowed, and start on the mask after it."""
        if token_id not in self._end_ids:
            self._next = self._workers.submit(self._advance, token_id)

    def _advance(self, token_id: int) -> _Allowed:
        self._matcher.consume_token(token_id)
        return _Allowed.by(self._matcher, self._vocab_size)


class GrammarCompiler:
    """Compiles constraints for one model's vocabulary and remembers the recent ones. Thread-safe.

    The vocabulary's own tables, a quarter of a second for 50,000 tokens, are built when the first constraint comes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        eos_token_ids: AbstractSet[int],
        num_workers: int,
        reasoning: ReasoningMarks | None = None,
    ) -> None:
        """reasoning   how the model marks it; the tokenizer shows these marks as text"""
        self._reasoning = reasoning
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(t for t in eos_token_ids if t < vocab_size)
        self._workers = ThreadPoolExecutor(num_workers, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._compiled = lru_cache(MAX_COMPILED)(self._compile)

    def check(self, constraint: Constraint, start: ReasoningStart | None = None) -> None:
        """Compile it if it is new: milliseconds, seldom more. Raises InvalidRequest with the reason and its field.

        start   how the answer begins: the constraint holds for what comes after the reasoning
        """
        self._compiled(constraint, start)

    def matcher(self, constraint: Constraint, start: ReasoningStart | None = None) -> GrammarMatcher:
        """A matcher at the beginning of an answer. Raises as `check`."""
        return GrammarMatcher(self._compiled(constraint, start), self._eos_token_ids, self._workers)

    def _compile(self, constraint: Constraint, start: ReasoningStart | None) -> _Compiled:
        grammar = _library_grammar(constraint)
        if start is not None and self._reasoning is not None:
            grammar = _after_reasoning(grammar, self._reasoning, start)
        with self._lock:
            vocabulary = self._vocabulary
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise InvalidRequest(f"{constraint.param}: {_short(matcher.get_error())}", param=constraint.param)
        first = _Allowed.by(matcher, self._vocab_size)
        if first.problem is not None:
            raise InvalidRequest(f"{constraint.param}: {first.problem}", param=constraint.param)
        return _Compiled(matcher, first)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        wrapper = TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocab_size, min(self._eos_token_ids, default=0)))
        return LLTokenizer(wrapper, n_vocab=self._vocab_size, eos_token=sorted(self._eos_token_ids) or None)


class _Vocabulary:
    """The tokenizer in the shape that llguidance reads; special tokens go by their spelling."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        self.bos_token_id = None
        texts = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = [token_id for token_id, text in enumerate(texts) if not text]
        for token_id in self.special_token_ids:
            texts[token_id] = tokenizer.spelled_bytes(token_id) or f"<unused-{token_id}>".encode()
        self.tokens = texts

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("give a str")  # how llguidance asks whether bytes can be tokenized
        return self._tokenizer.encode_literal(text)


def _library_grammar(constraint: Constraint) -> str:
    """The constraint in llguidance's own form. Raises InvalidRequest for text that is not even JSON or a grammar."""
    try:
        match constraint.kind:
            case "json_object":
                return LLMatcher.grammar_from_json_schema({"type": "object"}, _JSON_STYLE)
            case "json_schema":
                # Parsed and written again: the library pastes the text into a larger document.
                return LLMatcher.grammar_from_json_schema(json.dumps(json.loads(constraint.value)), _JSON_STYLE)
            case "choice":
                # As a pattern: not every escape of JSON is one of Lark.
                return LLMatcher.grammar_from_regex("|".join(map(re.escape, json.loads(constraint.value))))
            case "regex":
                # \d is 0 to 9, as in JSON Schema; Unicode has 750 digits more, and nobody means them.
                return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(constraint.value, 'd')}/")
            case "grammar":
                return grammar_from("grammar", constraint.value)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"{constraint.param}: {_short(str(error))}", param=constraint.param) from None


def _after_reasoning(grammar: str, marks: ReasoningMarks, start: ReasoningStart) -> str:
    """Anything up to the mark that closes the reasoning, then what `grammar` allows."""
    opening, closing = json.dumps(marks.opening), json.dumps(marks.closing)
    begin = "reasoning" if start == "open" else f"({opening} reasoning)?"
    rules = [
        f"start: {begin} @answer",
        r"reasoning: thought /\n{0,2}/",
        f"thought[suffix={closing}]: /(?s:.*)/",
    ]
    try:
        answer = json.loads(grammar)["grammars"][0]
    except ValueError:
        answer = {"lark_grammar": grammar}
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, {**answer, "name": "answer"}]})


def _short(reason: str) -> str:
    """The library's words on one line, without the mark that it leaves where its own state would follow."""
    line = " ".join(reason.replace("<non-verbose/>", "").split())
    return line if len(line) <= MAX_ERROR_CHARS else line[:MAX_ERROR_CHARS] + "…"
