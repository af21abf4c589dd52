"""Files of certificates and keys: read before anything starts, and what is wrong with them said with its remedy."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from services.gateway.config import GatewaySettings
from services.text_engine.config import TextEngineSettings
from services.vision_encoder.config import VisionEncoderSettings
from shared.certificates import read_validities
from shared.settings import SettingsError, load_settings
from tests.authority import Authority, Files

SERVICES = (GatewaySettings, VisionEncoderSettings, TextEngineSettings)
CERT, KEY, CA = "DIPTYCH_TLS_CERT_FILE", "DIPTYCH_TLS_KEY_FILE", "DIPTYCH_TLS_CA_FILE"
REQUIRE = "DIPTYCH_TLS_REQUIRE_CLIENT_CERT"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def files(authority: Authority) -> Files:
    return authority.issue("encoder")


def load(monkeypatch: pytest.MonkeyPatch, variables: dict[str, object], cls: type[Any] = VisionEncoderSettings) -> Any:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    return load_settings(cls, **({} if cls is GatewaySettings else {"model": "m"}))


# --- dates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "until", [datetime(2049, 12, 31, 23, 59, 59, tzinfo=UTC), datetime(2050, 1, 1, tzinfo=UTC), datetime(2001, 2, 3)]
)
def test_dates_are_read_as_the_library_of_x509_reads_them(authority: Authority, until: datetime):
    made = authority.issue("dates", not_after=until.replace(tzinfo=UTC))
    [validity, *_] = read_validities(made.cert)
    expected = x509.load_pem_x509_certificate(made.cert.read_bytes())
    assert validity.not_before == expected.not_valid_before_utc
    assert validity.not_after == expected.not_valid_after_utc == until.replace(tzinfo=UTC)


def test_every_certificate_of_a_file_is_read_and_what_stands_between_them_is_not(files: Files, tmp_path: Path):
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes(
        b"subject=/CN=\xc3\xa4\n" + files.cert.read_bytes() + b"\n# the authority\n" + files.ca.read_bytes()
    )
    assert read_validities(bundle) == read_validities(files.cert) + read_validities(files.ca)


@pytest.mark.parametrize("cut", [40, 200, 400])
def test_a_damaged_certificate_is_called_so(files: Files, tmp_path: Path, cut: int):
    damaged = tmp_path / "damaged.pem"
    lines = files.cert.read_text().splitlines(keepends=True)
    damaged.write_text("".join([lines[0], "".join(lines[1:-1])[:cut] + "\n", lines[-1]]))
    with pytest.raises(ValueError, match="damaged"):
        read_validities(damaged)


# --- what stops the start ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("service", SERVICES)
def test_one_set_of_variables_is_for_every_service(service: type[Any], files: Files, monkeypatch: pytest.MonkeyPatch):
    settings = load(monkeypatch, {CERT: files.cert, KEY: files.key, CA: files.ca}, service)
    assert (settings.tls_cert_file, settings.tls_key_file, settings.tls_ca_file) == (files.cert, files.key, files.ca)


@pytest.mark.parametrize("service", SERVICES)
def test_blank_is_no_tls(service: type[Any], monkeypatch: pytest.MonkeyPatch):
    blanks = dict.fromkeys((CERT, KEY, CA), " ") | ({} if service is GatewaySettings else {REQUIRE: ""})
    settings = load(monkeypatch, blanks, service)
    assert settings.tls_cert_file is settings.tls_key_file is settings.tls_ca_file is None


def test_a_file_that_is_not_there_is_named_with_its_variable(files: Files, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(SettingsError, match=r"DIPTYCH_TLS_CERT_FILE=/tls/tls.crt: there is no such file.*mounted\?"):
        load(monkeypatch, {CERT: "/tls/tls.crt", KEY: files.key})


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_key_that_may_not_be_read_is_told_from_one_that_is_missing(files: Files, monkeypatch: pytest.MonkeyPatch):
    files.key.chmod(0)
    try:
        with pytest.raises(SettingsError, match="may not read it; change its owner or its mode"):
            load(monkeypatch, {CERT: files.cert, KEY: files.key})
    finally:
        files.key.chmod(0o600)


def test_an_expired_certificate_stops_the_start_with_its_date(authority: Authority, monkeypatch: pytest.MonkeyPatch):
    expired = authority.issue_expired("encoder")
    with pytest.raises(SettingsError, match=r"expired-encoder\.crt: expired on 2001-02-03 04:05 UTC; renew it"):
        load(monkeypatch, {CERT: expired.cert, KEY: expired.key})


def test_a_bundle_of_authorities_may_hold_expired_ones_unless_all_are(
    authority: Authority, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    expired = authority.issue_expired("old").cert.read_bytes()
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes(expired + files.ca.read_bytes())
    assert load(monkeypatch, {CA: bundle}).tls_ca_file == bundle
    bundle.write_bytes(expired)
    with pytest.raises(SettingsError, match=r"bundle\.pem: expired on 2001-02-03"):
        load(monkeypatch, {CA: bundle})


def test_clients_certificates_are_asked_for_by_tls_only(files: Files, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(SettingsError, match="needs a certificate in front_cert_file"):
        load(monkeypatch, {"DIPTYCH_GATEWAY_FRONT_CLIENT_CA_FILE": files.ca}, GatewaySettings)


def test_a_key_of_another_certificate_is_refused_by_name(
    authority: Authority, files: Files, monkeypatch: pytest.MonkeyPatch
):
    other = authority.issue("other")
    with pytest.raises(SettingsError, match=r"DIPTYCH_TLS_KEY_FILE=\S+other.key is not the key of .*encoder.crt"):
        load(monkeypatch, {CERT: files.cert, KEY: other.key})


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({CERT: "cert"}, "DIPTYCH_TLS_KEY_FILE is not set; wanted: .*private key"),
        ({KEY: "key"}, "is a key without its certificate"),
        ({CERT: "key", KEY: "key"}, "DIPTYCH_TLS_CERT_FILE=.*holds no certificate; wanted: a PEM file"),
        ({CERT: "cert", KEY: "cert"}, "DIPTYCH_TLS_KEY_FILE=.*holds no private key; wanted: a PEM file"),
        ({CERT: "cert", KEY: "key", REQUIRE: "1"}, "REQUIRE_CLIENT_CERT=1: needs .*DIPTYCH_TLS_CA_FILE"),
        ({CA: "ca", REQUIRE: "1"}, "REQUIRE_CLIENT_CERT=1: needs DIPTYCH_TLS_CERT_FILE"),
    ],
)
def test_what_is_incomplete_or_mixed_up_is_said(
    given: dict[str, str], complaint: str, files: Files, monkeypatch: pytest.MonkeyPatch
):
    variables = {name: getattr(files, value, value) for name, value in given.items()}
    with pytest.raises(SettingsError, match=complaint):
        load(monkeypatch, variables)


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked_for_it(files: Files, tmp_path: Path, monkeypatch):
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(files.key.read_bytes(), password=None)
    locked = tmp_path / "locked.key"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(SettingsError, match="needs a passphrase; write it without one: openssl pkey"):
        load(monkeypatch, {CERT: files.cert, KEY: locked})


def test_the_gateways_front_has_a_certificate_of_its_own(files: Files, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DIPTYCH_GATEWAY_FRONT_CERT_FILE", str(files.cert))
    with pytest.raises(SettingsError, match="DIPTYCH_GATEWAY_FRONT_KEY_FILE is not set"):
        load_settings(GatewaySettings)
    monkeypatch.setenv("DIPTYCH_GATEWAY_FRONT_KEY_FILE", str(files.key))
    settings = load_settings(GatewaySettings)
    assert (settings.front_cert_file, settings.tls_cert_file) == (files.cert, None)
