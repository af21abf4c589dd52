"""What is said of a value on the command line that an option cannot take, in the words of a bad setting."""

from __future__ import annotations

import os
from typing import Any

import typer
from pydantic import ValidationError

from diptych.errors import BadSetting
from shared.settings_errors import limits_in_words, shown, wrong_value


def in_our_words(error: typer.BadParameter) -> Exception:
    """`--port 70000 is too large; give a whole number from 1 to 65535`; the error itself if it is not about a value.

    Typer has pydantic read the values of options, whose wording is about Python.
    """
    if not isinstance(error.__cause__, ValidationError):
        return error
    param: Any = error.param
    details = error.__cause__.errors(include_url=False)[0]
    limits = {name: limit for name, limit in (("ge", param.min), ("le", param.max)) if limit is not None}
    problem = wrong_value(details, param.type_descriptor.annotation, limits_in_words(limits))
    return BadSetting(f"{_as_written(error)}{shown(details['input'])} {problem}") if problem else error


def _as_written(error: Any) -> str:
    """`--port ` or `DIPTYCH_GATEWAY_PORT=`"""
    param, source = error.param, error.ctx.get_parameter_source(error.param.name)
    if source.name != "ENVIRONMENT":
        return f"{max(param.opts, key=len)} "
    variables = [param.envvar] if isinstance(param.envvar, str) else param.envvar
    return f"{next(name for name in variables if os.environ.get(name))}="
