"""Every setting of the gateway, with default and unit. Read from the environment once, at the start.

A setting `x` is the variable `DIPTYCH_GATEWAY_X`; only the Redis URL has the name everybody gives it, `REDIS_URL`.
Lists are separated by commas. A bad value stops the start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from services.gateway.file_store import LONGEST_LIFE_S
from shared.listen_address import DEFAULT_HOST, Host
from shared.log import LogFormat
from shared.service_token import ServiceTokens
from shared.service_urls import check_service_url
from shared.settings import Names, RedisUrl, split_names
from shared.sizes import ByteSize
from shared.tls_settings import AuthorityFile, CertFile, KeyFile, TlsCaFile, TlsCertFile, TlsKeyFile, TlsServerName

MIB = 2**20
LIST_MARKS = "[](){}\"'"
# Schemes of addresses that stand for all replicas of a name, with the scheme that each of them is asked by.
BY_NAME = {"dns": "http", "dns+https": "https"}


def _base_url(url: str) -> str:
    if "@" in url:
        raise ValueError(
            "no address may hold a user or a password; what services show each other is DIPTYCH_SERVICE_TOKEN"
        )
    if "://" not in url:
        raise ValueError(f"is not a service address; did you mean http://{url}?")
    parts = urlsplit(url)
    is_plain = parts.path in ("", "/") and not parts.query and not parts.fragment
    if parts.scheme not in ("http", "https", *BY_NAME) or not parts.hostname or not is_plain:
        raise ValueError(
            "is not a service address; give http://host:port, or dns://host:port for all replicas, "
            "or for TLS https://host:port or dns+https://host:port"
        )
    try:
        check_service_url(f"{BY_NAME.get(parts.scheme, parts.scheme)}:{url.partition(':')[2]}")
    except ValueError as error:
        raise ValueError(f"{url!r} {error}") from None
    if parts.scheme in BY_NAME and parts.port is None:
        raise ValueError(f"{url!r} needs a port: {parts.scheme}://host:port")
    return url.rstrip("/")


def _split_keys(value: object) -> object:
    """Blank is unset. What is written and holds no key is no open API: a template's variables may have been empty."""
    names = split_names(value)
    if isinstance(value, str) and value.strip() and not names:
        raise ValueError("holds no key; give KEY or NAME:KEY, separated by commas, or leave it out for none")
    return names


def _are_written_as_keys(keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
    """A list as JSON or YAML writes it would be keys that begin or end with its brackets and quotes."""
    written = [key.get_secret_value() for key in keys]
    if any(key[0] in LIST_MARKS or key[-1] in LIST_MARKS for key in written):
        raise ValueError("no key may begin or end with a bracket or quote; write keys as KEY,KEY or NAME:KEY,NAME:KEY")
    if any(key.endswith(":") for key in written):
        raise ValueError("a name has no key behind it; write keys as NAME:KEY")
    return keys


ServiceUrls = Annotated[tuple[Annotated[str, AfterValidator(_base_url)], ...], NoDecode, BeforeValidator(split_names)]
Keys = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_split_keys), AfterValidator(_are_written_as_keys)]
Seconds = Annotated[float, Field(gt=0)]


class GatewaySettings(BaseSettings):
    """Environment variables are these names in capitals with the prefix DIPTYCH_GATEWAY_, e.g. DIPTYCH_GATEWAY_PORT."""

    model_config = SettingsConfigDict(
        env_prefix="DIPTYCH_GATEWAY_", frozen=True, extra="forbid", validate_default=True, populate_by_name=True
    )

    host: Host = Field(DEFAULT_HOST, description="address to listen on; 0.0.0.0 opens it to the network")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="what is logged, and above")
    log_format: LogFormat = Field("auto", description="auto: readable lines on a terminal, JSON lines elsewhere")
    status_page: bool = Field(True, description="the control room at /status; where API keys are set it asks for one")
    status_interval_s: Seconds = Field(0.5, description="how old what it shows may be, however many are watching")
    samples_dir: Path | None = Field(None, description="folder of pictures that the chat page offers")

    text_engines: ServiceUrls = Field(
        ("http://127.0.0.1:8002",),
        description="addresses as http://host:port, or dns://host:port for all replicas of a name; by TLS https:// "
        "and dns+https://",
    )
    vision_encoders: ServiceUrls = Field(("http://127.0.0.1:8001",), description="the same for the vision encoders")
    redis_url: RedisUrl = None
    routing: Literal["affinity", "round_robin"] = Field(
        "affinity", description="of requests to text engines: least loaded and where the prefix is cached, or by turns"
    )
    probe_interval_s: Seconds = Field(1.0, description="time between two probes of a replica")
    probe_timeout_s: Seconds = Field(2.0, description="time for a replica to answer a probe")
    resolve_interval_s: Seconds = Field(3.0, description="time between two look-ups of a dns:// name")
    replica_wait_s: float = Field(
        0.0, ge=0, description="while a panel has no ready replica, requests wait so long for one instead of a 503"
    )

    service_token: ServiceTokens = ()
    tls_cert_file: TlsCertFile = None
    tls_key_file: TlsKeyFile = None
    tls_ca_file: TlsCaFile = None
    tls_server_name: TlsServerName = None
    front_cert_file: CertFile = Field(None, description="certificate, PEM, for clients of the API: its port speaks TLS")
    front_key_file: KeyFile = Field(None, description="that certificate's private key, PEM, without a passphrase")
    front_client_ca_file: AuthorityFile = Field(
        None, description="authorities, PEM; given: every client must show a certificate of theirs, besides its key"
    )
    api_keys: Keys = Field((), description="keys that open the API, as key or name:key; none: it is open to all")
    admin_keys: Keys = Field(
        (), description="keys, as api_keys, for /v1/cache, /v1/sleep, /v1/wake and adapters; none: these do not exist"
    )
    salt_cache_by_key: bool = Field(
        False, description="each API key finds only its own prompts in the prefix cache, so speed tells of no others"
    )
    max_requests_per_minute: int | None = Field(
        None, ge=1, description="requests of one key per minute; default: no limit"
    )
    max_running_requests: int | None = Field(None, ge=1, description="requests of one key at a time; default: no limit")
    max_body_bytes: ByteSize = Field(64 * MIB, gt=0, description="size of a request, its data URLs included")
    max_images_per_request: int = Field(32, ge=0, description="images in all messages of one request")
    max_image_bytes: ByteSize = Field(20 * MIB, gt=0, description="size of one encoded image")

    file_ttl_s: int = Field(86_400, ge=1, le=LONGEST_LIFE_S, description="life of an uploaded file, if not asked for")
    max_file_ttl_s: int = Field(LONGEST_LIFE_S, ge=1, le=LONGEST_LIFE_S, description="longest life to be asked for")
    file_quota_bytes: ByteSize = Field(
        256 * MIB, ge=0, description="uploaded files of one key at a time, pictures kept under names too; 0: no limit"
    )
    max_file_memory_bytes: ByteSize = Field(
        256 * MIB, gt=0, description="uploaded files kept here, for when Redis is gone"
    )

    fetch_timeout_s: Seconds = Field(10.0, description="a whole fetch: names, connections, redirects, every byte")
    max_redirects: int = Field(5, ge=0, le=10, description="redirects followed in one fetch")
    max_fetches_per_host: int = Field(16, ge=1, description="fetches at a time from one host")
    allow_private_addresses: bool = Field(False, description="fetch from any address, internal ones included")
    allowed_hosts: Names = Field((), description="host or host:port whose addresses are not checked")
    denied_hosts: Names = Field((), description="hosts, or .domains with all below them, that are never asked")
    only_hosts: Names = Field((), description="if given, the only hosts or .domains that pictures come from")
    max_fetch_cache_bytes: ByteSize = Field(
        256 * MIB, ge=0, description="fetched pictures kept while their servers allow"
    )

    connect_timeout_s: Seconds = Field(2.0, description="time to connect to a replica")
    admit_timeout_s: Seconds = Field(15.0, description="encoder: from sending an image to its admission")
    encode_timeout_s: Seconds = Field(120.0, description="encoder: from admission to the stored embedding")
    start_timeout_s: Seconds = Field(30.0, description="engine: from sending a request to its acceptance")
    idle_timeout_s: Seconds = Field(300.0, description="engine: between two events of a stream")
    known_images: int = Field(20_000, ge=0, description="images whose token count is remembered, 0.5 kB each")

    drain_delay_s: float = Field(0.0, ge=0, description="after SIGTERM, time to go on so that balancers notice")
    drain_timeout_s: Seconds = Field(30.0, description="after SIGTERM, time for running answers")

    @field_validator("front_client_ca_file")
    @classmethod
    def _is_asked_by_tls(cls, ca_file: Path | None, info: ValidationInfo) -> Path | None:
        if ca_file is not None and info.data.get("front_cert_file") is None:
            raise ValueError("needs a certificate in front_cert_file: only by TLS can clients show theirs")
        return ca_file
