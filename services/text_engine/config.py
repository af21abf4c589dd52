"""Every setting of the text engine, with default and unit, under the names that vLLM users know."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.log import LogFormat
from shared.settings import RedisUrl


class TextEngineSettings(BaseSettings):
    """Environment variables are these names in capitals with the prefix DIPTYCH_ENGINE_, e.g. DIPTYCH_ENGINE_PORT."""

    model_config = SettingsConfigDict(env_prefix="DIPTYCH_ENGINE_", extra="ignore", frozen=True)

    model: Path = Field(description="checkpoint folder in Hugging Face format")
    served_model_name: str | None = Field(None, description="model id in answers; default: the folder's name")
    host: str = "127.0.0.1"
    port: int = Field(8002, ge=0, le=65535)

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    attention_backend: Literal["auto", "cpu", "reference"] = "auto"
    num_threads: int | None = Field(
        None, ge=1, description="CPU threads of the model; default: $OMP_NUM_THREADS or all"
    )
    enforce_eager: bool = Field(False, description="no CUDA graphs, no compiled CPU kernels: plain PyTorch")

    max_model_len: int | None = Field(None, ge=1, description="tokens of prompt and answer; default: the model's own")
    max_num_seqs: int = Field(64, ge=1, description="sequences running at once")
    max_num_batched_tokens: int = Field(512, ge=1, description="tokens computed in one step")
    max_waiting_requests: int = Field(1024, ge=1, description="queue bound; more are refused with 503")
    kv_cache_memory: str | None = Field(None, description="bytes for the KV cache, e.g. 2GiB; overrides the next")
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of the GPU's memory for weights and KV cache; on a CPU see kv_cache_memory"
    )
    enable_prefix_caching: bool = True

    redis_url: RedisUrl = None
    redis_timeout_s: float = Field(0.3, gt=0)
    embedding_timeout_s: float = Field(60.0, gt=0, description="longest wait for one image's embedding")
    drain_timeout_s: float = Field(30.0, ge=0, description="time for running answers after SIGTERM")
    step_timeout_s: float = Field(30.0, gt=0, description="a step longer than this turns readiness off")

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: LogFormat = "auto"
