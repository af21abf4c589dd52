"""Command-line options made from a service's settings, so that names, defaults and meanings are written down once.

`--max-model-len` is the field `max_model_len` of the settings class. A flag wins over the environment variable, which
wins over the default. Values travel as text: the settings class alone decides what is valid.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from diptych.errors import BadSetting
from shared.settings import SettingsError, choices, load_command_line
from shared.settings_errors import flag
from shared.sizes import format_size

Given = Mapping[str, str | bool]  # field name -> value of a flag on the command line
S = TypeVar("S", bound=BaseSettings)
WIDEST_CHOICE = 60  # characters; longer ones are written out below their option


def with_settings(
    settings: type[BaseSettings], *, skip: Collection[str] = (), panel: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a typer command one option for each field; those that were used arrive in its parameter `given`.

    panel  title of the options' box in the help
    """
    fields = {name: field for name, field in settings.model_fields.items() if name not in skip}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "given"]

        def run(**values: Any) -> None:
            given = {name: values.pop(name) for name in fields}
            command(**values, given={name: value for name, value in given.items() if value is not None})

        made = [_parameter(name, field, panel) for name, field in fields.items()]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *made]}
        run.__signature__ = inspect.Signature([*own, *made])  # type: ignore[attr-defined]  # what typer reads
        return run

    return decorate


def build(settings: type[S], given: Given) -> S:
    """The settings from flags, environment and defaults. Raises BadSetting naming each wrong one."""
    try:
        return load_command_line(settings, given)
    except SettingsError as error:
        raise BadSetting(str(error)) from None


def as_flags(given: Given) -> list[str]:
    """The same flags again, to hand on to a child process."""
    words = []
    for name, value in given.items():
        if isinstance(value, bool):
            words.append(flag(name) if value else f"--no-{flag(name)[2:]}")
        else:
            words.append(f"{flag(name)}={value}")
    return words


def is_size(name: str) -> bool:
    """Whether a field is a number of bytes, which may be written as 64MiB."""
    return name.endswith(("_bytes", "_memory"))


def shown(name: str, value: object) -> object:
    """A field's default as it would be written."""
    if isinstance(value, (tuple, list)):
        return ",".join(map(str, value))
    return format_size(value) if is_size(name) and isinstance(value, int) else value


def in_words(default: object) -> object:
    """A default as the help shows it: a switch is on or off."""
    return ("on" if default else "off") if isinstance(default, bool) else default


def _parameter(name: str, field: FieldInfo, panel: str | None) -> inspect.Parameter:
    kind, words = describe(field.annotation)
    words = "SIZE" if is_size(name) else words
    default = None if field.is_required() else shown(name, field.default)
    text = (field.description or "").rstrip(".")
    text = text[:1].upper() + text[1:]
    if words is not None and len(words) > WIDEST_CHOICE:
        text, words = f"{text}. One of {', '.join(words.split('|'))}", "NAME"
    if default not in (None, ""):
        text += f"{' ' if text else ''}[dim](default: {in_words(default)})[/dim]"
    names = f"{flag(name)}/--no-{flag(name)[2:]}" if kind is bool else flag(name)
    option = typer.Option(names, help=text or None, metavar=words, show_default=False, rich_help_panel=panel)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def describe(annotation: Any) -> tuple[type, str | None]:
    """How typer should take a value of this type (text or switch), and what the help shows for it."""
    if words := choices(annotation):
        return str, "|".join(words)
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(each for each in get_args(annotation) if each is not type(None))
    if annotation is bool:
        return bool, None
    if get_origin(annotation) in (tuple, list):
        return str, "A,B,…"
    return str, {int: "INT", float: "NUMBER", Path: "PATH"}.get(annotation, "TEXT")
