"""What the engine says of one request, on its way to the task that streams it."""

from __future__ import annotations

import asyncio

import pytest

from services.text_engine.engine_io import RequestFailed, TokenOutput
from services.text_engine.mailbox import Mailbox
from shared.errors import NotReady, RequestAborted


def token(token_id: int) -> TokenOutput:
    return TokenOutput("r", 0, "a", [token_id], [], None)


async def test_all_that_waits_is_taken_at_once_and_in_order():
    mailbox = Mailbox()
    for number in range(3):
        mailbox.put(token(number))
    assert await mailbox.take() == [token(0), token(1), token(2)]


async def test_whoever_takes_from_an_empty_mailbox_waits_for_the_next_output():
    mailbox = Mailbox()
    taking = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    assert not taking.done()
    mailbox.put(token(1))
    mailbox.put(token(2))
    assert await taking == [token(1), token(2)]


async def test_a_reader_that_gives_up_leaves_what_comes_later_to_the_next():
    mailbox = Mailbox()
    taking = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    taking.cancel()
    mailbox.put(token(1))
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert await mailbox.take() == [token(1)]


async def test_nothing_comes_after_the_end():
    end, later = RequestFailed("r", RequestAborted("gone")), RequestFailed("r", NotReady("dead"))
    mailbox = Mailbox()
    for output in (token(1), end, later):
        mailbox.put(output)
    assert await mailbox.take() == [token(1), end]
