"""Every setting of the vision encoder, with default and unit. Imports no torch: the command line reads it too."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.listen_address import DEFAULT_HOST, Host
from shared.log import LogFormat
from shared.resources import MAX_THREADS, available_cores, default_threads
from shared.service_token import ServiceTokens
from shared.service_urls import check_service_url
from shared.settings import RedisUrl
from shared.sizes import ByteSize
from shared.tls_settings import TlsCaFile, TlsCertFile, TlsKeyFile, TlsRequireClientCert

DtypeName = Literal["auto", "bfloat16", "float16", "float32"]
Storage = Literal["exact", "int8"]
Quantization = Literal["none", "int8"]
MiB = 1 << 20


class VisionEncoderSettings(BaseSettings):
    """Environment variables are these names in capitals with the prefix DIPTYCH_ENCODER_, e.g. DIPTYCH_ENCODER_PORT."""

    model_config = SettingsConfigDict(env_prefix="DIPTYCH_ENCODER_", extra="ignore", frozen=True, populate_by_name=True)

    model: Path = Field(description="checkpoint folder in Hugging Face format")
    served_model_name: str | None = Field(None, description="model id in /v1/info; default: the folder's name")
    host: Host = Field(DEFAULT_HOST, description="address to listen on; 0.0.0.0 opens it to the network")
    port: int = Field(8001, ge=0, le=65535, description="port to listen on")
    public_url: str | None = Field(None, description="base URL under which others reach this very replica")

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU if there is one")
    dtype: DtypeName = Field(
        "auto",
        description="of weights and arithmetic; auto: bfloat16 where the device has it",
    )
    quantization: Quantization = Field(
        "none", description="of the tower's layers, on a CPU; int8: half of bfloat16's bytes, less exact"
    )
    enforce_eager: bool = Field(False, description="on a GPU: no CUDA graphs of the tower's passes")
    num_threads: int | None = Field(
        None, ge=1, le=MAX_THREADS, description="CPU threads of the tower; default: $OMP_NUM_THREADS or all"
    )
    num_decode_workers: int | None = Field(None, ge=1, description="processes that decode; default: half the cores")

    max_image_bytes: ByteSize = Field(20 * MiB, ge=1, description="size of one encoded image")
    max_image_pixels: int = Field(64_000_000, ge=1, description="width times height of one image, from its header")
    max_aspect_ratio: float = Field(1000.0, ge=1, description="longer side over shorter side")
    accept_embeddings: bool = Field(False, description="clients may send embeddings in place of pictures")
    background: str = Field(
        "#ffffff", pattern=r"^#[0-9a-fA-F]{6}$", description="what shows through transparency, e.g. #ffffff"
    )

    max_batch_size: int | None = Field(
        None, ge=1, description="images in one pass of the tower; default: 8, on a CPU as many as its caches hold"
    )
    max_queued_images: int = Field(256, ge=1, description="images admitted and not yet encoded; more get a 503")
    max_queued_bytes: ByteSize = Field(512 * MiB, ge=1, description="encoded bytes of those images")
    max_recent_bytes: ByteSize = Field(256 * MiB, ge=0, description="finished embeddings kept in this process")
    default_deadline_s: float = Field(120.0, gt=0, description="longest wait of a caller that states none")
    decode_timeout_s: float = Field(20.0, gt=0, description="time to decode one image, waiting not counted")
    stall_timeout_s: float = Field(
        45.0,
        gt=0,
        description="a tower pass longer than this turns readiness off, and other encoders get its pictures; less than "
        "the engine's embedding timeout",
    )
    drain_timeout_s: float = Field(30.0, ge=0, description="time for running work after SIGTERM")

    service_token: ServiceTokens = ()
    tls_cert_file: TlsCertFile = None
    tls_key_file: TlsKeyFile = None
    tls_ca_file: TlsCaFile = None
    tls_require_client_cert: TlsRequireClientCert = False
    redis_url: RedisUrl = None
    redis_timeout_s: float = Field(0.3, gt=0, description="the most that one cache operation may add to a request")
    embedding_storage: Storage = Field(
        "exact", description="int8: embeddings take half of bfloat16's bytes, off by at most 1/254 of a row's largest"
    )
    embedding_ttl_s: float = Field(86_400.0, ge=1, description="life of a cached embedding since its last use")

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="what is logged, and above")
    log_format: LogFormat = Field("auto", description="auto: readable lines on a terminal, JSON lines elsewhere")

    @field_validator("public_url")
    @classmethod
    def _is_service_url(cls, url: str | None) -> str | None:
        return None if url is None else check_service_url(url).rstrip("/")

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model.resolve().name

    @property
    def background_colour(self) -> tuple[int, int, int]:
        red, green, blue = bytes.fromhex(self.background[1:])
        return red, green, blue

    @property
    def tower_threads(self) -> int:
        return self.num_threads or default_threads()

    @property
    def decode_workers(self) -> int:
        return self.num_decode_workers or max(1, available_cores() // 2)
