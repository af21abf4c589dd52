"""Flags of other servers, and settings of ours that another program reads: what is said to who gives them."""

from __future__ import annotations

import pytest
from typer.main import get_command

from diptych import foreign_flags
from diptych.cli import app
from diptych.errors import BadSetting
from diptych.foreign_flags import INSTEAD, PROGRAMS, SAME


def flags_of(command: str) -> set[str]:
    """As `Command.parse_args` gathers them."""
    found = get_command(app).commands[command]  # type: ignore[attr-defined]
    return {name for param in found.params for name in (*param.opts, *param.secondary_opts)}


def said_of(command: str, *words: str) -> str:
    with pytest.raises(BadSetting) as refusal:
        foreign_flags.refuse(command, words, flags_of(command))
    return str(refusal.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-m", "llava"], "diptych serve has no -m; the model needs no flag, as in diptych serve demo"),
        (["llava", "--model-path=x"], "diptych serve has no --model-path; the model needs no flag, as in"),
        (["-c", "4096"], "diptych serve has no -c; here it is --max-model-len"),
        (["--context-length", "4096"], "diptych serve has no --context-length; here it is --max-model-len"),
        (["--mem-fraction-static=0.8"], "diptych serve has no --mem-fraction-static; here it is --gpu-memory-util"),
        (["-tp", "2"], "diptych serve has no -tp; here it is --tensor-parallel-size"),
        (["--max_model_len", "4096"], "diptych serve has no --max_model_len; here it is --max-model-len"),
        (["--api-key", "sk-1"], "diptych serve has no --api-key; set the variable DIPTYCH_GATEWAY_API_KEYS, as"),
        (
            ["--ssl-keyfile", "key.pem"],
            "diptych serve has no --ssl-keyfile; set the variable DIPTYCH_GATEWAY_FRONT_K",
        ),
        (["--routing", "affinity"], "diptych serve has no --routing; set the variable DIPTYCH_GATEWAY_ROUTING"),
        (
            ["--max-batch-size", "4"],
            "diptych serve has no --max-batch-size; set the variable DIPTYCH_ENCODER_MAX_B",
        ),
        (["--trust-remote-code"], "diptych serve has no --trust-remote-code; no code that comes with a model is ever"),
    ],
)
def test_a_flag_of_another_server_is_answered_with_what_does_the_same_here(words: list[str], said: str) -> None:
    assert said_of("serve", *words).startswith(said)


def test_a_key_on_the_command_line_is_not_repeated() -> None:
    assert "sk-secret" not in said_of("serve", "--api-key=sk-secret")


def test_a_setting_of_another_service_is_answered_with_that_services_command() -> None:
    assert said_of("gateway", "--max-num-seqs", "4").endswith("; --max-num-seqs is for diptych text-engine")
    assert said_of("text-engine", "--api-keys", "x").endswith("as every user of a machine can read its command lines")


@pytest.mark.parametrize("words", [["demo", "--port", "1"], ["--", "--api-key"], ["--nobody-knows"], ["-1"]])
def test_what_the_command_has_and_what_nobody_knows_is_left_to_the_command_line(words: list[str]) -> None:
    foreign_flags.refuse("serve", words, flags_of("serve"))


def test_every_answer_names_a_flag_or_variable_that_exists() -> None:
    settings = {field for each in PROGRAMS.values() for field in each.model_fields}
    known = flags_of("serve") | {f"--{field.replace('_', '-')}" for field in settings} | INSTEAD.keys()
    assert set(SAME.values()) <= known | {"--model"}
    assert not (SAME.keys() | INSTEAD.keys()) & flags_of("serve")
