"""Every setting of the text engine, with default and unit, under the names that vLLM users know."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from services.text_engine import parser_names
from shared.listen_address import DEFAULT_HOST, Host
from shared.log import LogFormat
from shared.reasoning import ReasoningFormat
from shared.resources import MAX_THREADS
from shared.service_token import ServiceTokens
from shared.settings import Names, RedisUrl
from shared.sizes import ByteSize, Size
from shared.tls_settings import TlsCaFile, TlsCertFile, TlsKeyFile, TlsRequireClientCert, TlsServerName
from shared.wire.engine import ToolFormat

LOGITS_PROCESSORS_GROUP = "diptych.logits_processors"  # of packages' entry points


def _are_modules(modules: tuple[str, ...]) -> tuple[str, ...]:
    wrong = next((module for module in modules if not all(module.partition("="))), None)
    if wrong is not None:
        raise ValueError(f"{wrong!r} is no NAME=FOLDER")
    return modules


LoraModules = Annotated[Names, AfterValidator(_are_modules)]


class TextEngineSettings(BaseSettings):
    """Environment variables are these names in capitals with the prefix DIPTYCH_ENGINE_, e.g. DIPTYCH_ENGINE_PORT."""

    model_config = SettingsConfigDict(env_prefix="DIPTYCH_ENGINE_", extra="ignore", frozen=True, populate_by_name=True)

    model: Path = Field(description="checkpoint folder in Hugging Face format")
    served_model_name: str | None = Field(None, description="model id in answers; default: the folder's name")
    host: Host = Field(DEFAULT_HOST, description="address to listen on; 0.0.0.0 opens it to the network")
    port: int = Field(8002, ge=0, le=65535, description="port to listen on")

    tool_call_parser: Annotated[Literal["auto"] | ToolFormat, BeforeValidator(parser_names.tool_call_parser)] = Field(
        "auto", description="how the model writes calls of tools; auto: as its chat template shows"
    )

    reasoning_parser: Annotated[
        Literal["auto", "none"] | ReasoningFormat, BeforeValidator(parser_names.reasoning_parser)
    ] = Field("auto", description="how the model marks its reasoning; auto: as its chat template shows")

    logits_processors: Names = Field(
        (), description="classes, as module:Class or entry points' names, whose changes of logits requests may ask for"
    )

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU if there is one")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto",
        description="of weights and arithmetic; auto: bfloat16 where the device has it",
    )
    attention_backend: Literal["auto", "cpu", "triton", "reference"] = Field(
        "auto",
        description="auto: Triton's kernels on a GPU, the compiled ones on a CPU where they are, else plain PyTorch",
    )
    num_threads: int | None = Field(
        None,
        ge=1,
        le=MAX_THREADS,
        description="CPU threads of the model, shared by its ranks; default: $OMP_NUM_THREADS or all",
    )
    model_implementation: Literal["auto", "native", "transformers"] = Field(
        "auto",
        description="whose code runs the model; transformers: its own, over our cache, slower; auto: native if it can",
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="dummy: random weights of the shapes that config.json says, to measure speed without files"
    )
    tensor_parallel_size: int = Field(
        1, ge=1, description="processes, each with its own GPU, that share one model; on a CPU slow, and for tests only"
    )
    batch_invariant: bool = Field(
        False, description="an answer is the same bit for bit in any batch; on CPUs with the compiled kernels only"
    )
    enforce_eager: bool = Field(
        False, description="on a GPU no CUDA graphs; on a CPU no compiled kernels: plain PyTorch"
    )

    max_model_len: int | None = Field(None, ge=2, description="tokens of prompt and answer; default: the model's own")
    max_num_seqs: int = Field(64, ge=1, description="sequences running at once")
    max_num_batched_tokens: int = Field(512, ge=1, validate_default=True, description="tokens computed in one step")
    max_prefill_tokens_while_decoding: int = Field(
        192, ge=1, description="those of them for prompts while answers are being written; as many: no such limit"
    )
    max_waiting_requests: int = Field(
        1024, ge=1, description="queue bound; more are refused with 503, and an n above it with 400"
    )
    max_queue_wait_s: float = Field(
        60.0, gt=0, description="under lasting overload, what would wait longer to begin gets a 503; inf: nothing does"
    )
    kv_cache_memory: Size | None = Field(
        None, description="bytes for the KV cache, on each GPU, e.g. 2GiB; overrides gpu_memory_utilization"
    )
    quantization: Literal["int8", "int4"] | None = Field(
        None, description="store weights in so many bits, from plain ones as they are loaded; default: as they are"
    )
    host_cache_memory: Size | None = Field(
        None, description="host memory for blocks that a GPU's cache has no room for, e.g. 16GiB; none: no copies"
    )
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8", "int8"] = Field(
        "auto",
        description="number format of the KV cache; bytes hold twice the tokens, fp8 on GPUs only; auto: the model's, "
        "or bfloat16 where that is float32 only because the CPU has no bfloat16 arithmetic",
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of the GPU's memory for weights and KV cache; on a CPU see kv_cache_memory"
    )
    lora_modules: LoraModules = Field(
        (), description="LoRA adapters in PEFT's format as NAME=FOLDER; each is a model that requests may name"
    )
    lora_folder: Path | None = Field(
        None, description="adapters below it may be loaded and unloaded while serving; default: none may"
    )
    max_loras: int = Field(8, ge=1, description="adapters loaded at a time; a batch may have requests of all of them")
    max_lora_rank: int = Field(64, ge=1, description="largest rank of an adapter")
    enable_prefix_caching: bool = Field(True, description="keep computed blocks of prompts for later ones")
    speculative: Literal["ngram", "off"] = Field(
        "ngram", description="ngram: guess tokens that repeat earlier text, where that pays; answers stay the same"
    )
    speculative_model: Path | None = Field(
        None, description="a smaller model of the same vocabulary, whose guesses are used too; default: none"
    )
    num_speculative_tokens: int = Field(8, ge=1, le=15, description="tokens guessed at once for one answer, at most")

    service_token: ServiceTokens = ()
    tls_cert_file: TlsCertFile = None
    tls_key_file: TlsKeyFile = None
    tls_ca_file: TlsCaFile = None
    tls_require_client_cert: TlsRequireClientCert = False
    tls_server_name: TlsServerName = None
    redis_url: RedisUrl = None
    redis_timeout_s: float = Field(0.3, gt=0, description="the most that one cache operation may add to a request")
    embedding_timeout_s: float = Field(60.0, gt=0, description="longest wait for one image's embedding")
    max_idle_embedding_bytes: ByteSize = Field(
        256 << 20, ge=0, description="embeddings kept in case a later request shows the same image"
    )
    drain_timeout_s: float = Field(30.0, ge=0, description="time for running answers after SIGTERM")
    step_timeout_s: float = Field(30.0, gt=0, description="a step longer than this turns readiness off")

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="what is logged, and above")
    log_format: LogFormat = Field("auto", description="auto: readable lines on a terminal, JSON lines elsewhere")

    @field_validator("max_num_batched_tokens")
    @classmethod
    def _has_room_for_all(cls, num_tokens: int, info: ValidationInfo) -> int:
        max_num_seqs = info.data.get("max_num_seqs", 1)  # absent: it was refused itself
        if num_tokens < max_num_seqs:
            raise ValueError(
                f"is below max_num_seqs, which is {max_num_seqs}: a step must have room for one token of every running "
                "sequence; raise it, or lower max_num_seqs"
            )
        return num_tokens
