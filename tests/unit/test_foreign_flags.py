"""Flags of other servers, and settings of ours that another program reads: what is said of them."""

from __future__ import annotations

import re
from functools import cache

import pytest
from typer.main import get_command

from diptych import foreign_flags
from diptych.cli import app
from diptych.errors import BadSetting
from diptych.foreign_flags import ALL, INSTEAD, PROGRAMS, SAME, SAME_IN
from diptych.variables import OVERRULED_BY_SERVE
from shared.settings import env_name


@cache
def flags_of(command: str) -> frozenset[str]:
    """As `Command.parse_args` gathers them."""
    found = get_command(app).commands[command]  # type: ignore[attr-defined]
    return frozenset(name for param in found.params for name in (*param.opts, *param.secondary_opts))


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


@pytest.mark.parametrize(
    ("command", "word", "said"),
    [
        ("text-engine", "--api-key=x", "set the variable DIPTYCH_SERVICE_TOKEN, as every user"),
        ("vision-encoder", "--ssl-keyfile", "here it is --tls-key-file"),
        ("vision-encoder", "--ssl-ca-certs", "here it is --tls-ca-file"),
        ("gateway", "--ssl-certfile", "here it is --front-cert-file"),
        ("gateway", "-dp", "only diptych serve starts several engines, with --text-engines N"),
        ("text-engine", "--dp-size=2", "only diptych serve starts several engines, with --text-engines N"),
        ("serve", "-dp", "here it is --text-engines"),
        ("gateway", "-ngl", "that is for diptych text-engine and diptych vision-encoder"),
        ("serve", "--tls-cert-file", "--tls-cert-file is for diptych gateway and"),
    ],
)
def test_the_answer_is_true_of_the_command_that_was_given(command: str, word: str, said: str) -> None:
    assert f"; {said}" in said_of(command, word)


ANSWERED = sorted(
    {*SAME, *(flag for table in SAME_IN.values() for flag in table), *(flag for _, table in INSTEAD for flag in table)}
    | {f"--{field.replace('_', '-')}" for settings in PROGRAMS.values() for field in settings.model_fields}
)
OF_HUGGING_FACE = {"HF_TOKEN", "HF_HOME"}


def variables_read_by(command: str) -> set[str]:
    programs = ALL if command == "serve" else (command,)
    read = {env_name(PROGRAMS[program], field) for program in programs for field in PROGRAMS[program].model_fields}
    if command == "serve":
        read -= set(OVERRULED_BY_SERVE)
    return read if command == "gateway" else read | OF_HUGGING_FACE


@pytest.mark.parametrize("command", ["serve", *ALL])
def test_whatever_is_answered_names_what_this_very_command_reads_or_a_command_that_does(command: str) -> None:
    for flag in set(ANSWERED) - flags_of(command):
        answer = said_of(command, flag).partition("; ")[2]
        named = re.findall(r"diptych ([a-z-]+)", answer)
        own = frozenset[str]().union(*(flags_of(each) for each in named or [command]))
        flags = re.findall(r"(?<![\w-])--?[a-z][a-z-]*", answer)
        assert [each for each in flags if each not in own and each[2:] not in own] == [], answer
        assert {*re.findall(r"\b[A-Z]+_[A-Z_]+\b", answer)} <= variables_read_by(command), answer
