"""What the commands judge before anything is downloaded, loaded or started. All raise BadSetting naming the setting."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path

from rich.console import Console

from diptych.errors import BadSetting, ModelUnavailable
from diptych.options import Given, S, build
from services.gateway.config import GatewaySettings
from services.text_engine.config import TextEngineSettings
from services.vision_encoder.config import VisionEncoderSettings
from shared.service_urls import check_service_url
from shared.settings import env_name, reason_of
from shared.settings_errors import shown, spelled


def build_engine_settings(given: Given) -> TextEngineSettings:
    """Of a text engine, as far as they need no checkpoint: well written, and to be had on this machine."""
    from services.text_engine.machine_preflight import check_machine

    settings = build(TextEngineSettings, given)
    _check_threads()
    _judge(check_machine, settings, given)
    return settings


def build_encoder_settings(given: Given) -> VisionEncoderSettings:
    """As `build_engine_settings`."""
    settings = build(VisionEncoderSettings, given)
    _check_threads()
    check_encoder_machine(settings, given)
    return settings


def check_encoder_machine(settings: VisionEncoderSettings, flags: Collection[str] = ()) -> None:
    """That this machine can run such an encoder.

    flags   the settings that the command line names
    """
    from services.vision_encoder.machine_preflight import check_machine

    _judge(check_machine, settings, flags)


def build_gateway_settings(host: str, port: int) -> GatewaySettings:
    """Those of the gateway that `serve` runs.

    host, port   of the command line, which are the variables' where it names none
    """
    given = {"host": host, "port": str(port)}
    variables = {name: os.environ.get(env_name(GatewaySettings, name)) for name in given}
    return build(GatewaySettings, {name: value for name, value in given.items() if value != variables[name]})


def check_port(settings: GatewaySettings | VisionEncoderSettings | TextEngineSettings) -> None:
    """That the service may listen where it is told to; also raises PortTaken."""
    from diptych.launch import check_port as check

    check(settings.host, settings.port)


def checked_server_url(given: str) -> str:
    """The address of a running server as `--url` names it: a scheme may be left out, a slash or /v1 may follow."""
    from diptych.client import server_url

    url = server_url(given.strip())
    try:
        return check_service_url(url)
    except ValueError as error:
        raise BadSetting(f"--url {shown(given)} {error}") from None


def check_checkpoint(settings: TextEngineSettings, flags: Collection[str] = ()) -> None:
    """That config.json says nothing against the settings, or against the checkpoint itself.

    flags   the settings that the command line names
    """
    from services.text_engine.preflight import check_settings

    _judge(check_settings, settings, flags)


def draft_folder(settings: TextEngineSettings, flags: Collection[str] = ()) -> Path | None:
    """Of the draft model, if there is one: it may be whatever MODEL may be.

    flags   the settings that the command line names
    """
    from diptych import models

    if settings.speculative_model is None:
        return None
    name = str(settings.speculative_model)
    try:
        return models.resolve(name, say=Console(stderr=True, highlight=False).print).folder
    except ModelUnavailable as error:
        raise BadSetting(f"{spelled(TextEngineSettings, 'speculative_model', name, flags=flags)}: {error}") from None


def _check_threads() -> None:
    """That OMP_NUM_THREADS is a number, if it is set."""
    from diptych.launch import given_threads

    given_threads()


def _judge(check: Callable[[S], None], settings: S, flags: Collection[str]) -> None:
    try:
        check(settings)
    except ValueError as error:
        raise BadSetting(reason_of(error, type(settings), flags=flags)) from None
