"""Errors in the client's words: the same thing may have several names in this API, and has one inside."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from shared.errors import DiptychError

# What is quoted is the client's, whatever it looks like; the apostrophe in a word opens no quotation.
_QUOTED: Final = r"""(?<!\w)(?P<quote>['"]).*?(?P=quote)"""


@contextmanager
def named_as_given(names: Mapping[str, str]) -> Iterator[None]:
    """Errors that are raised meanwhile name fields as the client did.

    names   a field's name inside -> the client's
    """
    try:
        yield
    except DiptychError as error:
        pattern = rf"(?P<name>{'|'.join(map(re.escape, names))})(?!\w)" if names else r"(?!)"
        told = renamed(error, re.compile(pattern), lambda found: names[found["name"]])
        if told is error:
            raise
        raise told from error


def renamed(error: DiptychError, pattern: re.Pattern[str], rename: Callable[[re.Match[str]], str]) -> DiptychError:
    """The same error with other names in its message and at the beginning of its param.

    pattern   finds a name where one begins
    rename    a name that was found, as it is to be told
    """
    param = error.param
    if param is not None and (found := pattern.match(param)):
        param = rename(found) + param[found.end() :]
    quoted_or_name = re.compile(rf"{_QUOTED}|(?<![\w.])(?:{pattern.pattern})", re.DOTALL)
    message = quoted_or_name.sub(lambda found: found.group() if found["quote"] else rename(found), error.message)
    if (message, param) == (error.message, error.param):
        return error
    return type(error)(message, param=param, retry_after_s=error.retry_after_s)
