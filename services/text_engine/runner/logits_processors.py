"""Logits processors: the operator's own code between the model and the choice of a token.

Which classes there are is said when the engine starts; a request only names them and gives arguments. Nothing that a
client sends is ever imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Final, Protocol

import torch

from services.text_engine.config import LOGITS_PROCESSORS_GROUP
from shared.errors import InvalidRequest
from shared.log import get_logger
from shared.settings_errors import SettingRefused

log = get_logger(__name__)

FIELD: Final = "vllm_xargs"

# (token ids generated so far, logits [vocab_size] fp32) -> None; changes the logits in place. Called for each token of
# a choice in turn; what was only guessed is never among the token ids.
Adjust = Callable[[AbstractSequence[int], torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a processor may want to know of the model.

    encode   text -> token ids, without special ones
    decode   token ids -> text
    """

    size: int
    eos_token_ids: frozenset[int]
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]


class LogitsProcessor(Protocol):
    """What a plugin's class has; it need not inherit from anything. Made once, with a `Vocabulary`, in the engine.

    name   under which requests give their arguments
    """

    name: str

    def for_request(self, arguments: Any, prompt_token_ids: AbstractSequence[int]) -> Adjust | None:
        """What to do with one request's logits; None: nothing, and then it costs nothing.

        Called 1 + n times for a request of n choices, in several threads at once: first to check the arguments, then
        for each choice.

        arguments   the request's `vllm_xargs[name]`, any JSON; None if it says nothing of this processor
        Raise ValueError for arguments that cannot be meant: the client gets the message.
        """
        ...


class LogitsProcessors:
    """Those of one engine, in the order in which they are applied."""

    def __init__(self, processors: Iterable[LogitsProcessor] = ()) -> None:
        self._by_name: dict[str, LogitsProcessor] = {}
        for processor in processors:
            if processor.name in self._by_name:
                raise ValueError(f"two logits processors are called {processor.name!r}")
            self._by_name[processor.name] = processor

    def for_request(
        self, arguments: Mapping[str, Any], prompt_token_ids: AbstractSequence[int]
    ) -> RequestProcessors | None:
        """None: no processor has anything to do. Raises InvalidRequest for a name that is not there, and for arguments
        that a processor refuses."""
        if not self._by_name and not arguments:
            return None
        unknown = next((name for name in arguments if name not in self._by_name), None)
        if unknown is not None:
            known = ", ".join(self._by_name) or "none"
            raise InvalidRequest(
                f"{FIELD} names {unknown[:80]!r}; this server's logits processors: {known}", param=FIELD
            )
        found = {}
        for name, processor in self._by_name.items():
            try:
                adjust = processor.for_request(arguments.get(name), prompt_token_ids)
            except ValueError as error:
                raise InvalidRequest(f"{FIELD}.{name}: {error}", param=f"{FIELD}.{name}") from None
            except Exception as error:
                if name not in arguments:
                    raise  # nothing the client could mend
                log.warning("a logits processor failed over a request's arguments", processor=name, exc_info=error)
                reason = f"{name} cannot use these arguments ({type(error).__name__})"
                raise InvalidRequest(f"{FIELD}.{name}: {reason}", param=f"{FIELD}.{name}") from None
            if adjust is not None:
                found[name] = adjust
        return RequestProcessors(found) if found else None


class RequestProcessors:
    """What one request's processors do to a row of logits, one after another."""

    def __init__(self, adjusts: Mapping[str, Adjust]) -> None:
        self._adjusts = adjusts

    def apply(self, row: torch.Tensor, generated_token_ids: AbstractSequence[int]) -> None:
        """row [vocab_size] fp32, in place; nothing is left of it if one of them fails."""
        for name, adjust in self._adjusts.items():
            try:
                adjust(generated_token_ids, row)
            except Exception as error:  # somebody else's code: its request pays for it, and no other
                log.error("a logits processor failed", processor=name, exc_info=error)
                row.fill_(float("-inf"))
                return


def load_logits_processors(names: Iterable[str], vocabulary: Vocabulary) -> LogitsProcessors:
    """names: each `module:Class`, or what a package calls its entry point in the group `diptych.logits_processors`.

    Raises ValueError naming the one that cannot be had.
    """
    return LogitsProcessors([_make(name, vocabulary) for name in names])


def _make(name: str, vocabulary: Vocabulary) -> LogitsProcessor:
    try:
        processor: LogitsProcessor = _find(name)(vocabulary)
    except Exception as error:
        raise SettingRefused("logits_processors", name, f"cannot be had: {type(error).__name__}: {error}") from error
    if not isinstance(getattr(processor, "name", None), str) or not callable(getattr(processor, "for_request", None)):
        raise SettingRefused("logits_processors", name, "has no name, which is a text, or no method for_request")
    return processor


def _find(name: str) -> Callable[[Vocabulary], LogitsProcessor]:
    if ":" not in name:
        found = entry_points(group=LOGITS_PROCESSORS_GROUP, name=name)
        if not found:
            raise LookupError(f"no package has such an entry point in {LOGITS_PROCESSORS_GROUP}; or give module:Class")
        made: Callable[[Vocabulary], LogitsProcessor] = next(iter(found)).load()
        return made
    module, _, attribute = name.partition(":")
    imported: Callable[[Vocabulary], LogitsProcessor] = getattr(importlib.import_module(module), attribute)
    return imported
