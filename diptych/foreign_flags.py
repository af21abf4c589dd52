"""Flags that other servers have and ours have not: each is answered with what does the same here.

A flag that vLLM and Diptych both have keeps vLLM's name and needs no line here. Reads only names; sets nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from pydantic_settings import BaseSettings

from diptych.errors import BadSetting
from services.gateway.config import GatewaySettings
from services.text_engine.config import TextEngineSettings
from services.vision_encoder.config import VisionEncoderSettings
from shared.settings import env_name

# Names of the same thing: what vLLM, SGLang and llama.cpp call it -> what it is called here.
SAME: Final[Mapping[str, str]] = {
    "-m": "--model",
    "--model-path": "--model",
    "--model-id": "--model",
    "-hf": "--model",
    "--hf-repo": "--model",
    "-a": "--served-model-name",
    "--alias": "--served-model-name",
    "-c": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "--context-length": "--max-model-len",
    "--max-seq-len": "--max-model-len",
    "-np": "--max-num-seqs",
    "--parallel": "--max-num-seqs",
    "--max-running-requests": "--max-num-seqs",
    "--max-queued-requests": "--max-waiting-requests",
    "-b": "--max-num-batched-tokens",
    "--batch-size": "--max-num-batched-tokens",
    "-ub": "--max-num-batched-tokens",
    "--ubatch-size": "--max-num-batched-tokens",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "-t": "--num-threads",
    "--threads": "--num-threads",
    "-tp": "--tensor-parallel-size",
    "--tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
    "-dp": "--text-engines",
    "--dp": "--text-engines",
    "--dp-size": "--text-engines",
    "--data-parallel-size": "--text-engines",
    "-q": "--quantization",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--kv-cache-memory-bytes": "--kv-cache-memory",
    "--swap-space": "--host-cache-memory",
    "-ctk": "--kv-cache-dtype",
    "-ctv": "--kv-cache-dtype",
    "--cache-type-k": "--kv-cache-dtype",
    "--cache-type-v": "--kv-cache-dtype",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--model-impl": "--model-implementation",
    "-md": "--speculative-model",
    "--model-draft": "--speculative-model",
    "--speculative-config": "--speculative-model",
    "--speculative-draft-model-path": "--speculative-model",
    "--draft-max": "--num-speculative-tokens",
    "--speculative-num-draft-tokens": "--num-speculative-tokens",
    "--enable-lora": "--lora-modules",
    "--lora": "--lora-modules",
    "--lora-paths": "--lora-modules",
    "--uvicorn-log-level": "--log-level",
    "--api-keys": "--api-key",
    "--api-key-file": "--api-key",
    "--ssl-certfile": "--front-cert-file",
    "--ssl-cert-file": "--front-cert-file",
    "--ssl-keyfile": "--front-key-file",
    "--ssl-key-file": "--front-key-file",
    "--ssl-ca-certs": "--front-client-ca-file",
    "--limit-mm-per-prompt": "--max-images-per-request",
    "--allowed-media-domains": "--only-hosts",
}

# What is no flag here at all.
INSTEAD: Final[Mapping[str, str]] = {
    "--api-key": "set the variable DIPTYCH_GATEWAY_API_KEYS, as every user of a machine can read its command lines",
    "--service-token": "set the variable DIPTYCH_SERVICE_TOKEN, as every user of a machine can read its command lines",
    "--redis-url": "set the variable REDIS_URL, as every user of a machine can read its command lines",
    "--revision": "a revision follows the model's name, as in ORGANISATION/NAME@REVISION",
    "--hf-token": "set HF_TOKEN, which Hugging Face's own tools read, too",
    "--download-dir": "set HF_HOME, which Hugging Face's own tools read, too",
    "--tokenizer": "the tokenizer is the one in the model's folder",
    "--tokenizer-path": "the tokenizer is the one in the model's folder",
    "--chat-template": "the chat template is the one in the model's folder",
    "--jinja": "chat templates are always applied; leave it out",
    "--mmproj": "the vision tower is in the model's folder; leave it out",
    "--trust-remote-code": "no code that comes with a model is ever run; leave it out",
    "--enable-chunked-prefill": "prompts are always computed in chunks; leave it out",
    "--enable-auto-tool-choice": "models may always call tools; leave it out",
    "--enable-sleep-mode": "engines can always be put to sleep, by who has a key of DIPTYCH_GATEWAY_ADMIN_KEYS",
    "--enable-metrics": "metrics are always on /metrics; leave it out",
    "--metrics": "metrics are always on /metrics; leave it out",
    "--disable-log-requests": "set DIPTYCH_GATEWAY_LOG_LEVEL=warning: then requests that went well are not logged",
    "--seed": "requests choose their seed: its field is `seed`",
    "-ngl": "all layers run on one device; choose it with --device",
    "--gpu-layers": "all layers run on one device; choose it with --device",
    "--n-gpu-layers": "all layers run on one device; choose it with --device",
    "-pp": "a model is split by --tensor-parallel-size only",
    "--pp-size": "a model is split by --tensor-parallel-size only",
    "--pipeline-parallel-size": "a model is split by --tensor-parallel-size only",
    "--cpu-offload-gb": "weights stay on their device; --quantization int8 or int4 makes them smaller",
    "-fa": "attention is always computed in blocks; leave it out",
    "--flash-attn": "attention is always computed in blocks; leave it out",
}

PROGRAMS: Final[Mapping[str, type[BaseSettings]]] = {
    "gateway": GatewaySettings,
    "vision-encoder": VisionEncoderSettings,
    "text-engine": TextEngineSettings,
}


def refuse(command: str, words: Sequence[str], own: Collection[str]) -> None:
    """Raises BadSetting for the first flag among the words that is another server's, or another service's of ours.

    command   as it is written, e.g. "serve"
    own       what the command has: flags, and arguments by their names
    """
    for word in words:
        if word == "--":
            return
        name = word.partition("=")[0]
        if name.startswith("-") and name not in own and (remedy := _remedy(command, name, own)):
            raise BadSetting(f"diptych {command} has no {name}; {remedy}")


def _remedy(command: str, name: str, own: Collection[str]) -> str | None:
    """What to write instead; None for what nobody knows."""
    hyphened = name.replace("_", "-")
    ours = SAME.get(hyphened, hyphened)
    if ours in own:
        return f"here it is {ours}"
    if ours == "--model" and "model" in own:
        return f"the model needs no flag, as in diptych {command} demo"
    if command != "serve" and command not in PROGRAMS:
        return None
    return INSTEAD.get(ours) or _of_a_service(command, ours)


def _of_a_service(command: str, flag: str) -> str | None:
    """Of a setting that the command does not take because another program reads it."""
    field = flag.removeprefix("--").replace("-", "_")
    programs = {program: settings for program, settings in PROGRAMS.items() if field in settings.model_fields}
    if not programs:
        return None
    if command == "serve":
        return f"set the variable {' or '.join(env_name(settings, field) for settings in programs.values())}"
    return f"{flag} is for diptych {' and diptych '.join(programs)}"
