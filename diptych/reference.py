"""The reference of all settings, docs/configuration.md, made from the settings themselves.

python -m diptych.reference            write it again
python -m diptych.reference --check    only say whether it is true
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from diptych.options import flag
from services.gateway.config import GatewaySettings
from services.text_engine.config import TextEngineSettings
from services.vision_encoder.config import VisionEncoderSettings
from shared.settings import env_name

FILE: Final = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
SERVICES: Final[dict[str, type[BaseSettings]]] = {
    "gateway": GatewaySettings,
    "vision-encoder": VisionEncoderSettings,
    "text-engine": TextEngineSettings,
}
INTRODUCTION: Final = """\
# Configuration

Every setting of every service. On a command line it is a flag (`diptych text-engine --max-num-seqs 32`), in a
container an environment variable; a flag wins over a variable, a variable over the default. A bad value stops the start
with its name and what was wanted. `diptych serve` takes the text engine's flags too and hands them on. Lists are
separated by commas.

This page is made from the settings by `python -m diptych.reference`; a test keeps it true.
"""


def reference() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for service, settings in SERVICES.items():
        parts.append(f"\n## diptych {service}\n\n| flag | variable | default | meaning |\n|---|---|---|---|\n")
        parts += [_row(settings, name, field) for name, field in settings.model_fields.items()]
    return "".join(parts)


def _row(settings: type[BaseSettings], name: str, field: FieldInfo) -> str:
    choices = _choices(field.annotation)
    meaning = (field.description or "") + (f" ({choices})" if choices else "")
    variable = env_name(settings, name)
    return f"| `{flag(name)}` | `{variable}` | {_default(field)} | {_cell(meaning)} |\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "*required*"
    match field.default:
        case None | () | "":
            return ""
        case bool(value):
            return "on" if value else "off"
        case tuple(values):
            return f"`{','.join(map(str, values))}`"
        case value:
            return f"`{value}`"


def _choices(annotation: Any) -> str:
    """ "a, b, c" for a field that takes one of a few words."""
    words = [
        word for part in (annotation, *get_args(annotation)) if get_origin(part) is Literal for word in get_args(part)
    ]
    return ", ".join(dict.fromkeys(words))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    if "--check" in sys.argv:
        return 0 if FILE.read_text() == reference() else 1
    FILE.write_text(reference())
    return 0


if __name__ == "__main__":
    sys.exit(main())
