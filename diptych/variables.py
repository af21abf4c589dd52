"""The environment variables of the whole system: which exist, which that are set are none, which `serve` overrules.

What a service makes of its own variables is said by its settings class; here only names are compared.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Final

from diptych.models import CACHE_VARIABLE, DEMO_MODEL_VARIABLE
from services.gateway.config import GatewaySettings
from services.text_engine.config import TextEngineSettings
from services.vision_encoder.config import VisionEncoderSettings
from shared.settings import env_name

PREFIX: Final = "DIPTYCH_"
SERVICES: Final = (GatewaySettings, VisionEncoderSettings, TextEngineSettings)
SERVER_VARIABLE: Final = "DIPTYCH_SERVER"
API_KEY_VARIABLE: Final = "DIPTYCH_API_KEY"
# Of the commands themselves, so of no service.
OF_COMMANDS: Final = (CACHE_VARIABLE, DEMO_MODEL_VARIABLE, SERVER_VARIABLE, API_KEY_VARIABLE)

# What the processes of `serve` say to each other stays on loopback: in clear, and shown only with the token.
OF_OTHER_MACHINES: Final = ("DIPTYCH_TLS_CERT_FILE", "DIPTYCH_TLS_KEY_FILE", "DIPTYCH_TLS_REQUIRE_CLIENT_CERT")
# A panel of `serve` is one of many, so its place and its model are its own; the gateway is told where they are.
OVERRULED_BY_SERVE: Final = (
    *(f"{PREFIX}{panel}_{name}" for panel in ("ENCODER", "ENGINE") for name in ("SERVED_MODEL_NAME", "HOST", "PORT")),
    "DIPTYCH_GATEWAY_VISION_ENCODERS",
    "DIPTYCH_GATEWAY_TEXT_ENGINES",
    *OF_OTHER_MACHINES,
)
MODELS: Final = ("MODEL", "DIPTYCH_ENCODER_MODEL", "DIPTYCH_ENGINE_MODEL")


def known() -> dict[str, str]:
    """Every variable of ours -> the setting's name or, of what belongs to no service, its own without DIPTYCH_."""
    of_services = {env_name(settings, field): field for settings in SERVICES for field in settings.model_fields}
    return {**of_services, **{name: name.removeprefix(PREFIX) for name in OF_COMMANDS}}


def unknown() -> list[str]:
    """Those of this process's environment that are named like ours and are none."""
    names = known()
    return [name for name in os.environ if name.upper().startswith(PREFIX) and name.upper() not in names]


def complaint(name: str) -> str:
    """What to tell of an unknown one: "DIPTYCH_API_KEYS is no setting and is ignored; did you mean …?" """
    spellings: dict[str, list[str]] = {}  # with the service's name and without -> the variables
    for variable, field in known().items():
        for spelling in {variable.removeprefix(PREFIX), field.upper()}:
            spellings.setdefault(spelling, []).append(variable)
    close = difflib.get_close_matches(name.upper().removeprefix(PREFIX), spellings, n=1)
    hint = f"; did you mean {' or '.join(spellings[close[0]])}?" if close else ""
    return f"{name} is no setting and is ignored{hint}"


def overruled(model: str) -> list[str]:
    """Those that are set and that `diptych serve MODEL` does not follow."""
    others = [name for name in MODELS if os.environ.get(name, model) not in (model, "")]
    return [*others, *(name for name in OVERRULED_BY_SERVE if os.environ.get(name))]


def drop_overruled() -> None:
    """Takes out of this process's environment what `serve` sets itself, so that nobody judges or follows it."""
    for name in [name for name in os.environ if name.upper() in OVERRULED_BY_SERVE]:
        del os.environ[name]


def without_unknown(environ: Mapping[str, str]) -> dict[str, str]:
    """What a child process gets: the command says what is wrong, and not each of its children again."""
    wrong = set(unknown())
    return {name: value for name, value in environ.items() if name not in wrong}
