"""The addresses of text engines and vision encoders that the gateway starts with, and those that stop its start."""

from __future__ import annotations

import re

import pytest

from services.gateway.config import GatewaySettings
from shared.settings import SettingsError, load_settings


@pytest.mark.parametrize("name", ["text_engines", "vision_encoders"])
@pytest.mark.parametrize("scheme", ["http", "https", "dns", "dns+https"])
@pytest.mark.parametrize(
    ("rest", "wrong"),
    [
        ("text..engine:8000", "names the host 'text..engine'"),
        ("x" * 64 + ":8000", "names the host"),
        ("engine:80a", "has a port that is none"),
        ("engine:0", "has a port that is none"),
        ("engine:99999", "has a port that is none"),
        ("eng\nine:8000", "holds a space or a control character"),
    ],
)
def test_the_gateway_does_not_start_with_an_address_that_nobody_can_ask(name: str, scheme: str, rest: str, wrong: str):
    bad = f"{scheme}://{rest}"
    with pytest.raises(SettingsError, match=re.escape(f"{bad!r} {wrong}")):
        load_settings(GatewaySettings, **{name: f"http://localhost:1,{bad}"})


def test_the_gateway_takes_addresses_of_all_four_kinds():
    urls = "http://engine:8000/, https://engine, dns://engines:8000, dns+https://engines:8000"
    assert load_settings(GatewaySettings, text_engines=urls).text_engines == (
        "http://engine:8000",
        "https://engine",
        "dns://engines:8000",
        "dns+https://engines:8000",
    )


@pytest.mark.parametrize("url", ["http://engine/v1", "http://engine?v=1", "http://engine#top", "dns://engines"])
def test_the_gateway_wants_addresses_without_a_path_and_names_with_a_port(url: str):
    with pytest.raises(SettingsError, match="text_engines="):
        load_settings(GatewaySettings, text_engines=url)
