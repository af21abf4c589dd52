"""What the engine says, as lines on the wire."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.text_engine.core.batch import Logprobs
from services.text_engine.core.stopping import Finish
from services.text_engine.engine_io import EngineOutput, EngineRequest, RequestFailed, TokenOutput
from services.text_engine.events import are_plain, event_of, line_of, plain_lines
from services.text_engine.tokenizer import Tokenizer
from shared.errors import RequestAborted

REQUEST = cast(EngineRequest, None)  # neither is looked at for new text alone
TOKENIZER = cast(Tokenizer, None)

plain_outputs = st.builds(
    TokenOutput,
    request_id=st.just("r"),
    index=st.integers(0, 127),
    text=st.text(st.characters(exclude_categories=["Cs"])),
    token_ids=st.lists(st.integers(0, 2**18), max_size=4),
    logprobs=st.just([]),
    finish=st.none(),
    waited_s=st.floats(0, 1),
    is_first=st.booleans(),
)


def token(finish: Finish | None = None, logprobs: tuple[tuple[int, Logprobs], ...] = ()) -> TokenOutput:
    return TokenOutput("r", 0, "a", [1], list(logprobs), finish)


@given(st.lists(plain_outputs, min_size=1))
def test_plain_lines_are_those_of_the_events(outputs: list[TokenOutput]):
    assert are_plain(outputs)
    assert plain_lines(outputs) == b"".join(line_of(event_of(output, REQUEST, TOKENIZER)) for output in outputs)


@pytest.mark.parametrize(
    "output",
    [
        token(finish=Finish("length")),
        token(logprobs=((1, Logprobs(-0.5, [1], [-0.5])),)),
        TokenOutput("r", 0, "a", [1], [], None, prompt_logprobs=[]),
        RequestFailed("r", RequestAborted("gone")),
    ],
    ids=["an end", "log-probabilities", "a prompt's log-probabilities", "a failure"],
)
def test_what_has_more_to_say_than_new_text_is_not_plain(output: EngineOutput):
    assert not are_plain([token(), output])
