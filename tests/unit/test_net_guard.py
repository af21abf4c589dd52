"""The address guard: which URLs and addresses may be fetched, however they are spelled."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

import pytest

from services.gateway.net_guard import HostResolver, NetGuard, is_public, parse_url
from shared.errors import ForbiddenUrl, ImageFetchFailed, InvalidImageUrl

INTERNAL = [
    "127.0.0.1",
    "127.255.255.254",
    "0.0.0.0",
    "10.0.0.1",
    "100.64.0.1",
    "100.100.100.200",
    "169.254.169.254",
    "168.63.129.16",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.192",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.1.1",
    "198.18.0.1",
    "198.51.100.7",
    "203.0.113.9",
    "224.0.0.1",
    "239.255.255.250",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "::ffff:0:127.0.0.1",
    "64:ff9b::127.0.0.1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::1",
    "100::1",
    "2001::1",
    "2001:db8::1",
    "2002:7f00:1::",
    "3fff::1",
    "5f00::1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fec0::1",
    "ff02::1",
]
PUBLIC = ["1.1.1.1", "8.8.8.8", "172.32.0.1", "100.128.0.1", "::ffff:8.8.8.8", "64:ff9b::808:808", "2606:4700::1111"]


@pytest.mark.parametrize("address", INTERNAL)
def test_addresses_that_are_not_on_the_public_internet_are_refused(address: str):
    """Case A20."""
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_allowed(address: str):
    assert is_public(ipaddress.ip_address(address))


@pytest.fixture
def resolver() -> Iterator[HostResolver]:
    made = HostResolver()
    yield made
    made.close()


def resolved_to(*addresses: str, allowed_hosts: tuple[str, ...] = ()) -> NetGuard:
    async def resolve(host: str, port: int) -> list[str]:
        return list(addresses)

    return NetGuard(resolve, allowed_hosts=allowed_hosts)


async def test_a_name_with_only_public_addresses_gives_all_of_them():
    guard = resolved_to("8.8.8.8", "2606:4700::1111")
    assert await guard.addresses("good.example", 443) == ["8.8.8.8", "2606:4700::1111"]


async def test_a_name_with_one_internal_address_among_public_ones_is_refused():
    """Case A20: mixed answers."""
    guard = resolved_to("8.8.8.8", "10.1.2.3")
    with pytest.raises(ForbiddenUrl):
        await guard.addresses("mixed.example", 80)


async def test_an_interface_zone_does_not_hide_a_link_local_address():
    guard = resolved_to("fe80::1%eth0")
    with pytest.raises(ForbiddenUrl):
        await guard.addresses("sneaky.example", 80)


async def test_a_name_without_an_address_is_a_failed_fetch():
    """Case A25."""
    guard = resolved_to()
    with pytest.raises(ImageFetchFailed):
        await guard.addresses("nowhere.example", 80)


@pytest.mark.parametrize(
    "spelling", ["127.1", "2130706433", "0x7f000001", "0177.0.0.1", "localhost", "127.0.0.1", "::1"]
)
async def test_whatever_the_system_resolves_to_loopback_is_refused_at_connect_time(
    resolver: HostResolver, spelling: str
):
    """Case A20: even if a spelling passed the URL check, its address does not."""
    with pytest.raises((ForbiddenUrl, ImageFetchFailed)):
        await NetGuard(resolver).addresses(spelling, 80)


async def test_an_allowed_host_is_not_checked_and_its_port_counts_if_it_was_given():
    guard = resolved_to("10.0.0.1", allowed_hosts=("minio", "localhost:9000", "[::1]:9000"))
    assert await guard.addresses("minio", 1234) == ["10.0.0.1"]
    assert await guard.addresses("LOCALHOST", 9000) == ["10.0.0.1"]
    assert await guard.addresses("::1", 9000) == ["10.0.0.1"]
    with pytest.raises(ForbiddenUrl):
        await guard.addresses("localhost", 9001)


async def test_the_opt_out_lifts_the_address_check(resolver: HostResolver):
    assert "127.0.0.1" in await NetGuard(resolver, allow_private_addresses=True).addresses("127.0.0.1", 80)


async def test_a_label_that_is_too_long_is_an_unknown_host_and_no_crash(resolver: HostResolver):
    with pytest.raises(OSError):
        await resolver("a" * 64 + ".example", 80)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.1/x.png",
        "http://2130706433/",
        "http://0x7f000001/",
        "http://0x7f.1/",
        "http://0177.0.0.1/",
        "http://127.0.0.1./",
        "http://1.2.3.4.5/",
        "http://0x/",
        "http://example.0x1/",
        "http://user@example.com/",
        "http://user:password@example.com/",
        "ftp://example.com/a.png",
        "gopher://example.com/",
        "unix:/run/x.sock",
        "s3://bucket/key",
        "file:///etc/hostname",
        "http+unix://x/",
    ],
)
def test_disguised_addresses_credentials_and_other_schemes_are_forbidden(url: str):
    """Cases A19, A20."""
    with pytest.raises(ForbiddenUrl):
        parse_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http:///x.png",
        "http://exa mple.com/",
        "http://example.com/\r\nHost: other",
        "http://example.com\\@127.0.0.1/",
        "http://127\u30020\u30020\u30021/",
        "http://\uff11\uff12\uff17.0.0.1/",
        "http://example.com:99999/",
        "http://example.com:0/",
        "http://example.com:8o/",
        "http://[::1/",
        "http://[fe80::1%25eth0]/",
        "http://[v1.x]/",
        "http://.example.com/",
        "http://exa%6dple.com/",
        "http://-x-/",
        "http://" + "a" * 300 + ".com/",
        "http://example.com/" + "x" * 9000,
    ],
)
def test_malformed_urls_are_refused(url: str):
    with pytest.raises(InvalidImageUrl):
        parse_url(url)


def test_a_good_url_is_taken_apart_exactly():
    target = parse_url("HTTPS://Pictures.Example:8443/a%20b/c.png?size=2&x=%2F#part")
    assert (target.scheme, target.host, target.port) == ("https", "pictures.example", 8443)
    assert target.path_and_query == "/a%20b/c.png?size=2&x=%2F"
    assert target.host_header == "pictures.example:8443"


def test_default_ports_stay_out_of_the_host_header():
    assert parse_url("http://example.com").host_header == "example.com"
    assert parse_url("http://example.com").path_and_query == "/"
    assert parse_url("https://[2606:4700::1111]/").host_header == "[2606:4700::1111]"
