"""Loads a service's settings; a bad one stops the start with one readable message per variable.

The fields themselves, with default and unit, live in each service's `config.py`; what is said of a bad one is worded in
`settings_errors`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, NoDecode

from shared.settings_errors import (
    SettingRefused,
    SettingsError,
    choices,
    env_name,
    explain,
    spelled,
    unknown_setting,
)

__all__ = [
    "Names",
    "RedisUrl",
    "SettingRefused",
    "SettingsError",
    "blank_is_unset",
    "choices",
    "env_name",
    "load_command_line",
    "load_settings",
    "reason_of",
    "split_names",
]

Settings = TypeVar("Settings", bound=BaseSettings)


def split_names(value: object) -> object:
    """ "a, b" -> ["a", "b"]"""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


# Separated by commas.
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_names)]


def blank_is_unset(value: object) -> object:
    return None if isinstance(value, str) and not value.strip() else value


def _is_redis_url(url: SecretStr | None) -> SecretStr | None:
    if url is not None and not url.get_secret_value().startswith(("redis://", "rediss://", "unix://")):
        raise ValueError("must start with redis://, rediss:// or unix://, e.g. redis://host:6379/0")
    return url


# Every service and every hosting platform knows this name, so it takes no prefix. Unset or blank: no cache. A secret as
# a whole: its password is.
RedisUrl = Annotated[
    SecretStr | None,
    Field(
        validation_alias=AliasChoices("redis_url", "REDIS_URL"),
        description="embeddings and uploaded files, e.g. redis://host:6379/0; none: each service keeps its own",
    ),
    BeforeValidator(blank_is_unset),
    AfterValidator(_is_redis_url),
]


def load_settings(cls: type[Settings], **overrides: Any) -> Settings:
    """`cls` from the environment, with `overrides` winning over it.

    An override of None counts as not given. Raises SettingsError naming every bad setting, unknown ones too.
    """
    return _load(cls, overrides, flags=())


def load_command_line(cls: type[Settings], given: Mapping[str, Any]) -> Settings:
    """As `load_settings`, for settings that flags of the command line set: a bad one is named as a flag."""
    return _load(cls, given, flags=given)


def _load(cls: type[Settings], overrides: Mapping[str, Any], flags: Collection[str]) -> Settings:
    given = {name: value for name, value in overrides.items() if value is not None}
    unknown = [unknown_setting(cls, name) for name in given if name not in cls.model_fields]
    if unknown:
        raise SettingsError("\n".join(unknown))
    try:
        return cls(**given)
    except ValidationError as error:
        lines = [explain(cls, details, given, flags) for details in error.errors(include_url=False)]
        raise SettingsError("\n".join(dict.fromkeys(lines))) from None  # a union tells once for each of its members


def reason_of(
    error: Exception,
    cls: type[BaseSettings],
    *,
    flags: Collection[str] = (),
    environ: Mapping[str, str] | None = None,
) -> str:
    """What to tell of a failed start: a refused setting as it was written, any other error in its own words.

    flags, environ   as for `spelled`
    """
    if isinstance(error, SettingRefused):
        return f"{spelled(cls, error.name, error.value, flags=flags, environ=environ)} {error.problem}"
    if isinstance(error, ValueError | OSError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}"
