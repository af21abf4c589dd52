"""Flags of other servers that Diptych does not have: each is answered with what does the same here.

A flag that vLLM and Diptych both have keeps vLLM's name and needs no line here. Reads only names; sets nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from pydantic_settings import BaseSettings

from diptych.errors import BadSetting
from diptych.variables import OVERRULED_BY_SERVE
from services.gateway.config import GatewaySettings
from services.text_engine.config import TextEngineSettings
from services.vision_encoder.config import VisionEncoderSettings
from shared.settings import env_name

_IS_SEEN = "as every user of a machine can read its command lines"
_OF_CLIENTS = {
    "--ssl-certfile": "--front-cert-file",
    "--ssl-keyfile": "--front-key-file",
    "--ssl-ca-certs": "--front-client-ca-file",
}
_OF_SERVICES = {
    "--ssl-certfile": "--tls-cert-file",
    "--ssl-keyfile": "--tls-key-file",
    "--ssl-ca-certs": "--tls-ca-file",
}

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
    "-dp": "--data-parallel-size",
    "--dp": "--data-parallel-size",
    "--dp-size": "--data-parallel-size",
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
    "--ssl-cert-file": "--ssl-certfile",
    "--ssl-key-file": "--ssl-keyfile",
    "--limit-mm-per-prompt": "--max-images-per-request",
    "--allowed-media-domains": "--only-hosts",
}

# Names of the same thing that is called differently from command to command.
SAME_IN: Final[Mapping[str, Mapping[str, str]]] = {
    "serve": {"--data-parallel-size": "--text-engines", **_OF_CLIENTS},
    "gateway": _OF_CLIENTS,
    "text-engine": _OF_SERVICES,
    "vision-encoder": _OF_SERVICES,
}

GATEWAY, PANELS, ENGINE = ("gateway",), ("text-engine", "vision-encoder"), ("text-engine",)
ALL = (*GATEWAY, *PANELS)

# What is no flag here at all: the programs of which it is true -> the flag -> what to do. `serve` runs all of them.
INSTEAD: Final[Sequence[tuple[Collection[str], Mapping[str, str]]]] = (
    (
        GATEWAY,
        {
            "--api-key": f"set the variable DIPTYCH_GATEWAY_API_KEYS, {_IS_SEEN}",
            "--enable-sleep-mode": "engines can always be put to sleep, with a key of DIPTYCH_GATEWAY_ADMIN_KEYS",
            "--disable-log-requests": "set DIPTYCH_GATEWAY_LOG_LEVEL=warning: then requests that went well are not "
            "logged",
        },
    ),
    (
        PANELS,
        {
            "--api-key": f"set the variable DIPTYCH_SERVICE_TOKEN, {_IS_SEEN}",
            "--revision": "a revision follows the model's name, as in ORGANISATION/NAME@REVISION",
            "--hf-token": "set HF_TOKEN, which Hugging Face's own tools read as well",
            "--download-dir": "set HF_HOME, which Hugging Face's own tools read as well",
            "--mmproj": "the vision tower is in the model's folder; leave it out",
            "--trust-remote-code": "no code that comes with a model is ever run; leave it out",
            "-ngl": "all layers run on one device; choose it with --device",
            "--gpu-layers": "all layers run on one device; choose it with --device",
            "--n-gpu-layers": "all layers run on one device; choose it with --device",
        },
    ),
    (
        ENGINE,
        {
            "--tokenizer": "the tokenizer is the one in the model's folder",
            "--tokenizer-path": "the tokenizer is the one in the model's folder",
            "--chat-template": "the chat template is the one in the model's folder",
            "--jinja": "chat templates are always applied; leave it out",
            "--enable-chunked-prefill": "prompts are always computed in chunks; leave it out",
            "--enable-auto-tool-choice": "models may always call tools; leave it out",
            "--enable-sleep-mode": "engines can always be put to sleep; leave it out",
            "--seed": "requests choose their seed: its field is `seed`",
            "-pp": "a model is split by --tensor-parallel-size only",
            "--pp-size": "a model is split by --tensor-parallel-size only",
            "--pipeline-parallel-size": "a model is split by --tensor-parallel-size only",
            "--cpu-offload-gb": "weights stay on their device; --quantization int8 or int4 makes them smaller",
            "-fa": "attention is always computed in blocks; leave it out",
            "--flash-attn": "attention is always computed in blocks; leave it out",
        },
    ),
    (
        ALL,
        {
            "--service-token": f"set the variable DIPTYCH_SERVICE_TOKEN, {_IS_SEEN}",
            "--redis-url": f"set the variable REDIS_URL, {_IS_SEEN}",
            "--enable-metrics": "metrics are always on /metrics; leave it out",
            "--metrics": "metrics are always on /metrics; leave it out",
            "--data-parallel-size": "only diptych serve starts several engines, with --text-engines N",
        },
    ),
)

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
    usual = SAME.get(hyphened, hyphened)
    ours = SAME_IN.get(command, {}).get(usual, usual)
    if ours in own:
        return f"here it is {ours}"
    if ours == "--model" and "model" in own:
        return f"the model needs no flag, as in diptych {command} demo"
    if command != "serve" and command not in PROGRAMS:
        return None
    return _instead(command, ours) or _of_a_service(command, ours)


def _instead(command: str, flag: str) -> str | None:
    """For what is no flag of any command: true of this one or, if it is not, whose business the flag is."""
    texts = [(programs, table[flag]) for programs, table in INSTEAD if flag in table]
    for programs, text in texts:
        if command == "serve" or command in programs:
            return text
    return f"that is for {_commands(texts[0][0])}" if texts else None


def _of_a_service(command: str, flag: str) -> str | None:
    """Of a setting that the command does not take because another program reads it."""
    field = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
    programs = {program: settings for program, settings in PROGRAMS.items() if field in settings.model_fields}
    if not programs:
        return None
    names = [env_name(settings, field) for settings in programs.values()]
    read = [name for name in dict.fromkeys(names) if name not in OVERRULED_BY_SERVE]
    if command == "serve" and read:
        return f"set the variable {' or '.join(read)}"
    return f"{flag} is for {_commands(programs)}"


def _commands(programs: Iterable[str]) -> str:
    return " and ".join(f"diptych {program}" for program in programs)
