"""What is said of a bad setting: its name as it was written, its value, what is allowed, what to do.

`--max-model-len 0 is too small; give a whole number of at least 1`. No wording of pydantic's passes, and no secret:
what has pydantic's type for one is named and not shown.
"""

from __future__ import annotations

import os
import shlex
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final, Literal, Union, get_args, get_origin

from pydantic import AliasChoices, SecretStr
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings

from shared.log import redact

_OWN_WORDS: Final = "Value error, "  # what pydantic puts before a validator's message
_LIMITS: Final = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}


class SettingsError(ValueError):
    """One line per bad setting: the variable, its value, what was wanted."""


class SettingRefused(ValueError):
    """A setting that is well written and that this model or this machine cannot be run with.

    name      of the field
    problem   goes on after name and value: "is more than the model has; give at most 2048"
    """

    def __init__(self, name: str, value: object, problem: str) -> None:
        super().__init__(f"{name}={value} {problem}")
        self.name = name
        self.value = value
        self.problem = problem


def spelled(
    cls: type[BaseSettings],
    field: str,
    value: object,
    *,
    flags: Collection[str] = (),
    environ: Mapping[str, str] | None = None,
) -> str:
    """`--port 7`, `DIPTYCH_GATEWAY_PORT=7` or, from Python, `port=7`: as it was written.

    flags     the fields of `cls` that flags of the command line set
    environ   None: this process's
    """
    is_flag = field in flags
    variable = env_name(cls, field)
    is_variable = variable in (os.environ if environ is None else environ)
    name = flag(field) if is_flag else variable if is_variable else field
    if is_secret(cls.model_fields[field].annotation):
        return f"{name} (not shown)"
    if is_flag and isinstance(value, bool):
        return name if value else f"--no-{name[2:]}"
    return f"{name}{' ' if is_flag else '='}{shown(value)}"


def flags_of(cls: type[BaseSettings], argv: Sequence[str]) -> set[str]:
    """The fields that a command line sets, if it is that of a process that runs this one service."""
    names = {word.partition("=")[0] for word in argv[1:]}
    return {field for field in cls.model_fields if names & {flag(field), f"--no-{flag(field)[2:]}"}}


def flag(field: str) -> str:
    """max_model_len -> --max-model-len"""
    return f"--{field.replace('_', '-')}"


def shown(value: object) -> str:
    """A value as a shell would take it, without what may be a password before an @."""
    before, at, behind = str(value).rpartition("@")
    text = f"***@{behind}" if at and ":" in before else str(value)
    return shlex.quote(redact(text)) if text else "''"


def is_secret(annotation: Any) -> bool:
    """Whether values of this type, or any part of them, must not be shown."""
    return annotation is SecretStr or any(is_secret(part) for part in get_args(annotation))


def env_name(cls: type[BaseSettings], field: str) -> str:
    """The environment variable that sets `field`: its own alias if it has one, else the prefix and its name."""
    info = cls.model_fields[field]
    alias = info.validation_alias
    if isinstance(alias, AliasChoices):
        names = [str(choice) for choice in alias.choices]
        return next((name for name in names if name in os.environ), names[-1])
    if isinstance(alias, str):
        return alias
    return f"{cls.model_config.get('env_prefix', '')}{field}".upper()


def unknown_setting(cls: type[BaseSettings], name: str) -> str:
    close = get_close_matches(name, cls.model_fields, n=1)
    return f"there is no setting {name!r}" + (f"; did you mean {close[0]!r}?" if close else "")


def explain(
    cls: type[BaseSettings], details: ErrorDetails, given: Mapping[str, Any], flags: Collection[str] = ()
) -> str:
    """One line about one of pydantic's complaints.

    given   the settings that were not read from the environment
    flags   those of them that the command line set
    """
    field = _field_of(cls, details["loc"])
    words = details["msg"].removeprefix(_OWN_WORDS)
    if field is None:
        return ": ".join([*(str(part) for part in details["loc"]), words])
    info = cls.model_fields[field]
    if details["type"] == "missing":
        return f"{env_name(cls, field)} is not set; wanted: {info.description}"
    # What is given wins over its variable, so a variable that is set as well is not what was refused.
    where = spelled(cls, field, details["input"], flags=flags, environ={} if field in given else None)
    if details["type"] == "value_error":
        return f"{where} {words}" if words.startswith(("is ", "must ")) else f"{where}: {words}"
    problem = wrong_value(details, info.annotation, _limits(info.metadata))
    return f"{where} {problem or f'is not written as it must be; wanted: {info.description}'}"


def choices(annotation: Any) -> list[str]:
    """The words that a field takes, those of all members of a union; empty for any other type."""
    literals = [part for part in (annotation, *get_args(annotation)) if get_origin(part) is Literal]
    return [str(word) for literal in literals for word in get_args(literal)]


def wrong_value(details: ErrorDetails, annotation: Any, limits: str) -> str:
    """What is wrong with a value and what to give instead, to be read after it; "" if its type does not tell.

    limits   of a number: "from 1 to 65535"
    """
    if words := choices(annotation):
        close = get_close_matches(str(details["input"]), words, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        return f"is not one of {', '.join(words)}{hint}"
    kind = _kind(annotation)
    match details["type"]:
        case "greater_than_equal" | "greater_than":
            return f"is too small; give {kind} {limits}"
        case "less_than_equal" | "less_than":
            return f"is too large; give {kind} {limits}"
        case _ if kind:
            return f"is not {kind}" + (f"; give one {limits}" if limits else "")
        case _:
            return ""


def _kind(annotation: Any) -> str:
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(each for each in get_args(annotation) if each is not type(None))
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(annotation, "")


def _limits(metadata: Iterable[object]) -> str:
    return limits_in_words({name: getattr(each, name) for each in metadata for name in _LIMITS if hasattr(each, name)})


def limits_in_words(found: Mapping[str, float]) -> str:
    """ "from 1 to 15", "of at least 1", "above 0", empty without limits

    found   ge, gt, le or lt -> the limit
    """
    if found.keys() == {"ge", "le"}:
        return f"from {found['ge']} to {found['le']}"
    return " and ".join(f"{_LIMITS[name]} {limit}" for name, limit in found.items())


def _field_of(cls: type[BaseSettings], location: tuple[int | str, ...]) -> str | None:
    """pydantic reports a field under its name or under any of its aliases."""
    if not location:
        return None
    for name, info in cls.model_fields.items():
        alias = info.validation_alias
        aliases = alias.choices if isinstance(alias, AliasChoices) else [alias]
        if location[0] == name or location[0] in aliases:
            return name
    return None
