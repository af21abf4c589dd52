"""Loads a service's settings; a bad one stops the start with one readable message per variable.

The fields themselves, with default and unit, live in each service's `config.py`.
"""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, NoDecode

from shared.log import redact

Settings = TypeVar("Settings", bound=BaseSettings)


class SettingsError(ValueError):
    """One line per bad setting: the variable, its value, what was wanted."""


def _split(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


# Separated by commas.
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """ "512MiB", "2 GiB" or plain bytes -> bytes. Raises ValueError naming the forms that are known."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?I?B?)\s*", text.upper())
    unit = match.group(2) if match else None
    if match is None or (unit not in _UNITS and f"{unit}B" not in _UNITS):
        raise ValueError(f"{text!r} is not a size; write bytes, or a number with KiB, MiB, GiB, KB, MB or GB")
    return int(float(match.group(1)) * _UNITS[unit if unit in _UNITS else f"{unit}B"])


def _is_size(text: str) -> str:
    parse_size(text)
    return text


Size = Annotated[str, AfterValidator(_is_size)]  # as the operator wrote it


def _blank_is_unset(value: object) -> object:
    return None if isinstance(value, str) and not value.strip() else value


# Every service and every hosting platform knows this name, so it takes no prefix. Unset or blank: no cache.
RedisUrl = Annotated[
    str | None,
    Field(
        validation_alias=AliasChoices("redis_url", "REDIS_URL"),
        pattern=r"^(rediss?|unix)://",
        description="embeddings and uploaded files, e.g. redis://host:6379/0; none: each service keeps its own",
    ),
    BeforeValidator(_blank_is_unset),
]


def load_settings(cls: type[Settings], **overrides: Any) -> Settings:
    """`cls` from the environment, with `overrides` (command-line options) winning over it.

    An override of None counts as not given. Raises SettingsError naming every bad setting, unknown ones too.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    unknown = [_unknown(cls, name) for name in given if name not in cls.model_fields]
    if unknown:
        raise SettingsError("\n".join(unknown))
    try:
        return cls(**given)
    except ValidationError as error:
        lines = [_explain(cls, details, given) for details in error.errors(include_url=False)]
        raise SettingsError("\n".join(lines)) from None


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


def _unknown(cls: type[BaseSettings], name: str) -> str:
    close = get_close_matches(name, cls.model_fields, n=1)
    return f"there is no setting {name!r}" + (f"; did you mean {close[0]!r}?" if close else "")


def _explain(cls: type[BaseSettings], details: ErrorDetails, given: dict[str, Any]) -> str:
    """`DIPTYCH_ENCODER_PORT = 'abc': Input should be a valid integer`, or the option that was given instead."""
    field = _field_of(cls, details["loc"])
    if field is None:
        where = ".".join(str(part) for part in details["loc"]) or cls.__name__
    else:
        where = f"--{field.replace('_', '-')}" if field in given else env_name(cls, field)
    if details["type"] == "missing":
        description = cls.model_fields[field].description if field else None
        return f"{where} is not set" + (f"; wanted: {description}" if description else "")
    if field is not None and "SecretStr" in repr(cls.model_fields[field].annotation):
        return f"{where} (not shown): {details['msg']}"
    return f"{where} = {redact(repr(details['input']))}: {details['msg']}"


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
