"""A command of ours: its help, and what it says of words that it cannot read.

The help is a page as narrow as it must be: an option's name on a line of its own, its meaning below.

Typer's own tables give every name, type and meaning a column, and cut what does not fit into 80 characters.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text
from typer.core import TyperArgument, TyperCommand

from diptych import foreign_flags
from diptych.options import describe, in_words
from diptych.usage import in_our_words

MAX_WIDTH = 100  # longer lines are hard to read, however wide the terminal is


class Command(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {name for param in self.get_params(ctx) for name in (*param.opts, *param.secondary_opts)}
        foreign_flags.refuse(_name(ctx), args, own)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            raise in_our_words(error) from None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        console = Console(highlight=False)
        console.width = min(console.width, MAX_WIDTH)
        for part in self._parts(ctx):
            console.print(part)

    def _parts(self, ctx: Any) -> Iterator[RenderableType]:
        yield Text(self.get_usage(ctx))
        for paragraph in inspect.cleandoc(self.help or "").split("\n\n"):
            yield ""
            yield _paragraph(paragraph)
        for title, params in self._panels(ctx).items():
            yield ""
            yield Text(title, style="bold")
            for param in params:
                yield Padding(_heading(param), (0, 0, 0, 2))
                yield Padding(_meaning(param, ctx), (0, 0, 0, 6))
        if self.epilog:
            yield ""
            yield _paragraph(self.epilog)

    def _panels(self, ctx: Any) -> dict[str, list[Any]]:
        panels: dict[str, list[Any]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            usual = "Arguments" if isinstance(param, TyperArgument) else "Options"
            panels.setdefault(getattr(param, "rich_help_panel", None) or usual, []).append(param)
        return {title: params for title, params in panels.items() if params}


def _name(ctx: Any) -> str:
    """ "serve", "bench run" """
    return "" if ctx.parent is None else f"{_name(ctx.parent)} {ctx.info_name}".strip()


def _paragraph(text: str) -> RenderableType:
    """Flowing text; lines that are indented are examples and stay as they are."""
    if text.startswith(" "):
        return Text.from_markup(text)
    return Text.from_markup(" ".join(text.split()))


def _heading(param: Any) -> Text:
    if isinstance(param, TyperArgument):
        return Text(param.metavar or str(param.name).upper(), style="cyan")
    heading = Text(", ".join([*param.opts, *param.secondary_opts]), style="cyan")
    if not param.is_flag:
        heading.append(f" {_value(param)}", style="yellow")
    return heading


def _value(param: Any) -> str:
    """INT from 1 to 64, NUMBER, PATH, a|b"""
    kind = param.metavar or describe(param.type_descriptor.annotation)[1]
    if param.min is None:
        return str(kind)
    return f"{kind} from {param.min:g} to {param.max:g}" if param.max is not None else f"{kind} from {param.min:g}"


def _meaning(param: Any, ctx: Any) -> Text:
    meaning = Text.from_markup(param.help or "")
    for addition in _additions(param, ctx):
        meaning.append(f" ({addition})" if meaning else addition, style="dim")
    return meaning


def _additions(param: Any, ctx: Any) -> Iterable[str]:
    if param.required:
        yield "required"
    if param.envvar and param.show_envvar:
        yield "also " + ", ".join([param.envvar] if isinstance(param.envvar, str) else param.envvar)
    default = param.get_default(ctx, call=False)
    if param.show_default and default not in (None, "") and not param.is_eager:
        yield f"default: {in_words(default)}"
