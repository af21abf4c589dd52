"""A service's certificate: taken up again when it is renewed, its end known; and which name a peer's must hold."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from structlog.testing import capture_logs

from shared.metrics import watch_certificates
from shared.peer_names import PeerNames, explain_tls
from shared.tls import Tls
from tests.authority import Authority, Files

SOON = datetime.now(UTC).replace(microsecond=0) + timedelta(days=3)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def tls_of(files: Files) -> Tls:
    return Tls("services", cert_file=files.cert, key_file=files.key, ca_file=files.ca)


def shown(server: ssl.SSLContext, client: ssl.SSLContext, name: str = "encoder") -> bytes | None:
    """The certificate that a new connection is shown. Raises ssl.SSLError where the two do not agree."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    here = client.wrap_bio(to_client, to_server, server_hostname=name)
    there = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(6):
        for side in (here, there):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return here.getpeercert(binary_form=True)


def test_without_a_certificate_nothing_is_listened_to_by_tls_and_nothing_expires():
    tls = Tls("services")
    assert tls.server_context() is None
    assert tls.expires_at is None


def test_a_renewed_certificate_is_shown_to_new_connections(authority: Authority):
    tls = tls_of(authority.issue("encoder"))
    server, client = tls.server_context(), tls.client_context()
    assert server is not None
    before = shown(server, client)
    tls.refresh()
    assert shown(server, client) == before
    authority.issue("encoder")
    with capture_logs() as logs:
        tls.refresh()
        tls.refresh()
    assert shown(server, client) not in (None, before)
    assert [log["event"] for log in logs] == ["certificate renewed", "certificate expires"]


def test_a_certificate_without_its_key_is_waited_for_and_the_old_one_goes_on(authority: Authority):
    files = authority.issue("encoder")
    tls = tls_of(files)
    server, client = tls.server_context(), tls.client_context()
    assert server is not None
    before, renewed = shown(server, client), authority.issue("encoder", file="renewed")
    files.cert.write_bytes(renewed.cert.read_bytes())
    with capture_logs() as logs:
        tls.refresh()
        tls.refresh()
    assert [log["event"] for log in logs] == ["renewed certificate cannot be used"]  # once
    assert "is not the key" in logs[0]["reason"]
    assert shown(server, client) == before
    files.key.write_bytes(renewed.key.read_bytes())
    tls.refresh()
    assert shown(server, client) not in (None, before)


def test_files_that_are_gone_change_nothing(authority: Authority):
    files = authority.issue("encoder")
    tls = tls_of(files)
    server, client = tls.server_context(), tls.client_context()
    assert server is not None
    files.cert.unlink()
    tls.refresh()
    assert shown(server, client)


def test_an_authority_that_is_added_is_trusted_from_then_on(authority: Authority, tmp_path: Path):
    tls = Tls("services", ca_file=authority.ca_file)
    client = tls.client_context()
    newer = Authority(tmp_path / "newer")
    server = tls_of(newer.issue("encoder")).server_context()
    assert server is not None
    with pytest.raises(ssl.SSLCertVerificationError):
        shown(server, client)
    authority.ca_file.write_bytes(authority.ca_file.read_bytes() + newer.ca_file.read_bytes())
    tls.refresh()
    assert shown(server, client)


def test_only_the_given_authority_is_trusted_and_only_for_the_name(authority: Authority, tmp_path: Path):
    client = tls_of(authority.issue("engine")).client_context()
    server = tls_of(authority.issue("encoder")).server_context()
    assert server is not None
    assert client.cert_store_stats()["x509_ca"] == 1
    with pytest.raises(ssl.SSLCertVerificationError, match="not valid for 'other'"):
        shown(server, client, "other")


def test_the_first_end_of_all_certificates_is_said_at_the_start_and_exported(authority: Authority):
    files = authority.issue("encoder", not_after=SOON)
    with capture_logs() as logs:
        tls = tls_of(files)
    assert [(log["event"], log["log_level"], log["days_left"]) for log in logs] == [
        ("certificate expires", "warning", 2)
    ]
    registry = CollectorRegistry()
    watch_certificates(registry, [tls, Tls("front")])
    [line] = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    assert line.startswith('diptych:tls_certificate_expiry_timestamp_seconds{use="services"} ')
    assert float(line.split()[1]) == SOON.timestamp()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://10.0.0.1:8001/ready", "encoders"),  # found behind a name
        ("https://10.0.0.1:8002/ready", "default"),
        ("https://[fd00::1]:8001/ready", "default"),
        ("https://encoder.example:8001/ready", None),  # as it is called
        ("http://10.0.0.1:8001/ready", None),
    ],
)
async def test_an_address_is_checked_against_the_name_that_led_to_it(url: str, expected: str | None):
    names = PeerNames("default")
    names.expect("dns+https://encoders:8001", ["https://10.0.0.1:8001"])
    assert await expected_name(names, url) == expected


async def expected_name(names: PeerNames, url: str) -> str | None:
    request = httpx.Request("GET", url)
    await names.name_request(request)
    name: str | None = request.extensions.get("sni_hostname")
    return name


async def test_an_address_to_which_a_name_leads_no_longer_is_forgotten():
    names = PeerNames()
    urls = [f"https://10.0.0.{number}:8001" for number in (1, 2, 3)]
    names.expect("dns+https://encoders:8001", urls[:2])
    names.expect("dns+https://others:8001", ["https://10.0.0.9:8001"])
    names.expect("dns+https://encoders:8001", urls[1:])
    assert [await expected_name(names, url) for url in urls] == [None, "encoders", "encoders"]
    assert await expected_name(names, "https://10.0.0.9:8001") == "others"


async def test_without_a_default_an_address_must_be_in_the_certificate_itself():
    request = httpx.Request("GET", "https://10.0.0.1:8001/ready")
    await PeerNames().name_request(request)
    assert "sni_hostname" not in request.extensions


def test_a_failed_handshake_is_explained_and_other_failures_are_not():
    error = httpx.ConnectError("failed")
    error.__cause__ = ssl.SSLCertVerificationError(
        1, "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: Hostname mismatch (_ssl.c:1006)"
    )
    assert explain_tls(error) == "its certificate is not trusted: Hostname mismatch; see DIPTYCH_TLS_SERVER_NAME"
    assert explain_tls(httpx.ConnectError("All connection attempts failed")) is None
