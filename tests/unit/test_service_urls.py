"""Addresses of our own services: every one that is taken can be asked, and of others it is said what is wrong."""

from __future__ import annotations

import httpx
import pytest

from services.vision_encoder.config import VisionEncoderSettings
from shared.service_urls import check_service_url
from shared.settings import load_settings
from shared.settings_errors import SettingsError

GOOD = [
    "http://encoder",
    "http://encoder:8001",
    "https://encoder.svc.cluster.local.:8001",
    "http://vision_encoder_1:1",
    "http://127.0.0.1:65535",
    "http://[::1]:8001",
    "http://bücher.example:8001",
    "http://proxy/encoder-1/",
]
BAD = [
    ("encoder:8001", "start with"),
    ("ftp://encoder", "start with"),
    ("", "start with"),
    ("http://", "no host"),
    ("http://:8001", "no host"),
    ("http://encoder..svc:8001", r"'encoder\.\.svc'"),
    ("http://.svc", r"'\.svc'"),
    (f"http://{'a' * 64}", "a{64}"),
    ("http://a*b", r"'a\*b'"),
    ("http://enc oder", "space"),
    ("http://enc\noder", "control character"),
    ("http://[::1", "IPv6"),
    ("http://[encoder]", "IPv6"),
    ("http://[1:2]", "IPv6"),
    ("http://encoder:80a", "port"),
    ("http://encoder:0", "port"),
    ("http://encoder:65536", "port"),
    ("http://encoder:-1", "port"),
]


@pytest.mark.parametrize("url", GOOD)
def test_an_address_that_can_be_asked_is_taken_as_it_is(url: str):
    assert check_service_url(url) == url
    assert httpx.URL(url).host


@pytest.mark.parametrize(("url", "wrong"), BAD)
def test_an_address_that_nobody_can_ask_is_refused_and_told_what_is_wrong(url: str, wrong: str):
    with pytest.raises(ValueError, match=wrong):
        check_service_url(url)


@pytest.mark.parametrize("url", ["http://encoder:80a", "http://encoder..svc:8001", "encoder:8001"])
def test_an_encoder_starts_with_no_such_address(url: str):
    with pytest.raises(SettingsError, match=rf"public_url={url}:? (has|names|must)"):
        load_settings(VisionEncoderSettings, model="m", public_url=url)


def test_an_encoders_address_loses_its_last_slash():
    settings = load_settings(VisionEncoderSettings, model="m", public_url="http://encoder:8001/")
    assert settings.public_url == "http://encoder:8001"
