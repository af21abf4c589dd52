"""Every setting of the text engine, with default and unit, under the names that vLLM users know."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.log import LogFormat
from shared.settings import RedisUrl
from shared.wire import ToolFormat


class TextEngineSettings(BaseSettings):
    """Environment variables are these names in capitals with the prefix DIPTYCH_ENGINE_, e.g. DIPTYCH_ENGINE_PORT."""

    model_config = SettingsConfigDict(env_prefix="DIPTYCH_ENGINE_", extra="ignore", frozen=True)

    model: Path = Field(description="checkpoint folder in Hugging Face format")
    served_model_name: str | None = Field(None, description="model id in answers; default: the folder's name")
    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 opens it to the network")
    port: int = Field(8002, ge=0, le=65535, description="port to listen on")

    tool_call_parser: Literal["auto"] | ToolFormat = Field(
        "auto", description="how the model writes calls of tools; auto: as its chat template shows"
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
        None, ge=1, description="CPU threads of the model, shared by its ranks; default: $OMP_NUM_THREADS or all"
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="dummy: random weights of the shapes that config.json says, to measure speed without files"
    )
    tensor_parallel_size: int = Field(
        1, ge=1, description="processes, each with its own GPU, that share one model; on a CPU slow, and for tests only"
    )
    enforce_eager: bool = Field(
        False, description="on a GPU no CUDA graphs; on a CPU no compiled kernels: plain PyTorch"
    )

    max_model_len: int | None = Field(None, ge=1, description="tokens of prompt and answer; default: the model's own")
    max_num_seqs: int = Field(64, ge=1, description="sequences running at once")
    max_num_batched_tokens: int = Field(512, ge=1, description="tokens computed in one step")
    max_prefill_tokens_while_decoding: int = Field(
        192, ge=1, description="those of them for prompts while answers are being written; as many: no such limit"
    )
    max_waiting_requests: int = Field(1024, ge=1, description="queue bound; more are refused with 503")
    kv_cache_memory: str | None = Field(
        None, description="bytes for the KV cache, on each GPU, e.g. 2GiB; overrides gpu_memory_utilization"
    )
    kv_cache_dtype: Literal["auto", "fp8", "int8"] = Field(
        "auto", description="number format of the KV cache; a byte a number holds twice the tokens; auto: the model's"
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of the GPU's memory for weights and KV cache; on a CPU see kv_cache_memory"
    )
    enable_prefix_caching: bool = Field(True, description="keep computed blocks of prompts for later ones")

    redis_url: RedisUrl = None
    redis_timeout_s: float = Field(0.3, gt=0, description="the most that one cache operation may add to a request")
    embedding_timeout_s: float = Field(60.0, gt=0, description="longest wait for one image's embedding")
    drain_timeout_s: float = Field(30.0, ge=0, description="time for running answers after SIGTERM")
    step_timeout_s: float = Field(30.0, gt=0, description="a step longer than this turns readiness off")

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="what is logged, and above")
    log_format: LogFormat = Field("auto", description="auto: readable lines on a terminal, JSON lines elsewhere")
