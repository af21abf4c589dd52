"""The reference of all settings, docs/configuration.md, made from the settings themselves.

python -m diptych.reference            write it again
python -m diptych.reference --check    only say whether it is true
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from diptych.options import shown
from services.gateway.config import GatewaySettings
from services.text_engine.config import TextEngineSettings
from services.vision_encoder.config import VisionEncoderSettings
from shared.settings import choices, env_name
from shared.settings_errors import flag

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
with its name and what was wanted; a variable that begins with `DIPTYCH_` and that nothing reads brings a warning. Lists
are separated by commas; a size is a number of bytes or has a unit: `20MiB`, or `20mb`, which is 20 million bytes.

Keys, tokens and `REDIS_URL` are better given as variables: every user of a machine can read its command lines. None is
ever shown, neither in an error nor in a log.

`diptych serve` takes the text engine's flags and hands them on; settings of the gateway and the encoders reach it
through the environment. Its `--host` and `--port` are the gateway's, its `--served-model-name` is both panels'. A flag
that vLLM, SGLang or llama.cpp calls otherwise is answered with its name here. The panels' model, name, host and port,
where the gateway finds them, and `DIPTYCH_TLS_CERT_FILE`, `DIPTYCH_TLS_KEY_FILE` and `DIPTYCH_TLS_REQUIRE_CLIENT_CERT`
it sets itself: the panels stay on loopback. It says so where the environment has them.

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
    words = ", ".join(choices(field.annotation))
    meaning = _cell((field.description or "") + (f" ({words})" if words else ""))
    variable = env_name(settings, name)
    if name == "model":  # the commands of `diptych.cli` take it as their argument
        return f"| first argument | `{variable}` or `MODEL` | `demo` | {meaning}, a hub id, demo or smollm2 |\n"
    return f"| `{flag(name)}` | `{variable}` | {_default(name, field)} | {meaning} |\n"


def _default(name: str, field: FieldInfo) -> str:
    match field.default:
        case None | () | "":
            return ""
        case bool(value):
            return "on" if value else "off"
        case value:
            return f"`{shown(name, value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    if "--check" in sys.argv:
        return 0 if FILE.read_text() == reference() else 1
    FILE.write_text(reference())
    return 0


if __name__ == "__main__":
    sys.exit(main())
