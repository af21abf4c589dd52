"""The command line: what it offers, what it refuses and how, and that its names are those of settings and documents."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic_settings import BaseSettings

import diptych
from diptych import cli, options, variables
from diptych.chat import choose_model, split_words
from diptych.demo import normal
from diptych.errors import BadSetting
from services.gateway.config import GatewaySettings
from services.text_engine.config import TextEngineSettings
from services.vision_encoder.config import VisionEncoderSettings
from shared.settings import env_name

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("serve", "demo", "chat", "batch", "check", "gateway", "vision-encoder", "text-engine", "bench", "plan")
SERVICES = {
    "gateway": GatewaySettings,
    "vision-encoder": VisionEncoderSettings,
    "text-engine": TextEngineSettings,
}
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")]


@dataclass
class Done:
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("serve", "--port", "x", VARIABLE="y")`: the command in this process, on a wide terminal without colours."""
    for name in os.environ:
        if name.startswith("DIPTYCH_") or name in ("MODEL", "REDIS_URL"):
            monkeypatch.delenv(name)

    def run_here(*words: str, **environment: str) -> Done:
        for name, value in {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb", **environment}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["diptych", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return Done(int(ended.value.code or 0), captured.out, captured.err)

    return run_here


def test_help_lists_every_command_and_how_to_start(run: Run) -> None:
    done = run("--help")
    assert done.returncode == 0
    assert all(re.search(rf"^\W*{command} ", done.stdout, re.MULTILINE) for command in COMMANDS)
    assert "diptych demo" in done.stdout


@pytest.mark.parametrize("command", ["serve", "chat", "gateway", "vision-encoder", "text-engine"])
def test_the_help_of_a_command_shows_an_example_that_uses_it(run: Run, command: str) -> None:
    done = run(command, "--help")
    assert done.returncode == 0
    assert re.search(rf"Example.*diptych {command}", done.stdout, re.DOTALL)


@pytest.mark.parametrize(("command", "settings"), SERVICES.items())
def test_every_setting_of_a_service_is_an_option_of_its_command(
    run: Run, command: str, settings: type[BaseSettings]
) -> None:
    text = run(command, "--help").stdout
    for name in settings.model_fields:
        assert name == "model" or re.search(rf"{options.flag(name)}\b", text), name


PAGES = [[command] for command in COMMANDS] + [["bench", "run"], ["bench", "compare"], []]


@pytest.mark.parametrize("words", PAGES, ids=" ".join)
def test_help_fits_a_narrow_terminal_and_nothing_is_cut(run: Run, words: list[str]) -> None:
    narrow, wide = (run(*words, "--help", COLUMNS=columns).stdout for columns in ("80", "400"))
    assert all(len(line) <= 80 for line in narrow.splitlines())
    flags = set(re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", wide))
    assert flags
    assert flags == set(re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", narrow))
    assert "…" not in re.sub(r"A,B,…|\[IMAGE\]…", "", narrow)
    if words and words != ["bench"]:  # pages in columns read differently at each width
        assert narrow.split() == wide.split()


@pytest.mark.parametrize("name", ["--url", "--server"])
def test_a_server_has_the_same_two_names_everywhere(run: Run, name: str) -> None:
    for words in (["chat"], ["bench", "run"]):
        assert re.search(r"^ *--url, --server TEXT", run(*words, "--help").stdout, re.MULTILINE)
    done = run("bench", "run", name, "http://127.0.0.1:9", "--workloads", "none")
    assert (done.returncode, "none" in done.stderr) == (2, True)


@pytest.mark.parametrize("command", ["serve", "batch", "plan", "gateway", "vision-encoder", "text-engine"])
def test_every_switch_says_whether_it_is_on(run: Run, command: str) -> None:
    page = re.split(r"^  (?=-)", run(command, "--help").stdout, flags=re.MULTILINE)
    switches = [entry for entry in page if re.match(r"--[a-z-]+(, --no-[a-z-]+)? *\n", entry)]
    assert switches
    assert [entry for entry in switches if not re.search(r"default: (on|off)\)", entry)] == []


def test_the_version_is_the_distributions(run: Run) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert run("--version").stdout == f"diptych {version}\n"
    assert diptych.__version__ == version


@pytest.mark.parametrize(
    ("words", "environment", "complaint"),
    [
        (
            ["text-engine", ".", "--max-num-seqs", "0"],
            {},
            "--max-num-seqs 0 is too small; give a whole number of at least 1",
        ),
        (["text-engine", "."], {"DIPTYCH_ENGINE_PORT": "many"}, "DIPTYCH_ENGINE_PORT=many is not a whole number"),
        (["serve", "--max-model-len", "long"], {}, "--max-model-len long is not a whole number"),
        (
            ["gateway", "--text-engines", "ftp://engine"],
            {},
            "--text-engines ftp://engine is not a service address; give http://host:port",
        ),
        (["serve", "--cache-memory", "lots"], {}, "--cache-memory lots is not a size"),
        (["serve", "--kv-cache-memory", "abc"], {}, "--kv-cache-memory abc is not a size"),
        (
            ["serve", "--dtype", "flaot16"],
            {},
            "--dtype flaot16 is not one of auto, bfloat16, float16, float32; did you",
        ),
        (["serve", "--max-model-len", "999999"], {}, "--max-model-len 999999 is more than the 2048 tokens"),
        (
            ["serve", "--tensor-parallel-size", "3"],
            {},
            "--tensor-parallel-size 3 must divide the model's num_attention",
        ),
        (["serve", "--lora-modules", "a=/none"], {}, "--lora-modules a=/none names the folder /none, which holds no"),
        (
            ["serve"],
            {"DIPTYCH_ENGINE_MAX_MODEL_LEN": "9000"},
            "DIPTYCH_ENGINE_MAX_MODEL_LEN=9000 is more than the 2048",
        ),
        (["serve"], {"DIPTYCH_ENCODER_DTYPE": "int9"}, "DIPTYCH_ENCODER_DTYPE=int9 is not one of"),
        (["serve"], {"DIPTYCH_GATEWAY_ROUTING": "best"}, "DIPTYCH_GATEWAY_ROUTING=best is not one of affinity, round_"),
        (["text-engine", "demo", "--max-model-len", "4096"], {}, "--max-model-len 4096 is more than the 2048 tokens"),
        (["text-engine", "."], {"DIPTYCH_ENGINE_KV_CACHE_MEMORY": "2 pints"}, "DIPTYCH_ENGINE_KV_CACHE_MEMORY"),
        (
            ["serve", "--num-threads", "99999"],
            {},
            "--num-threads 99999 is too large; give a whole number from 1 to 1024",
        ),
        (["vision-encoder", "demo", "--num-threads", "1025"], {}, "--num-threads 1025 is too large"),
        (["gateway"], {"DIPTYCH_GATEWAY_API_KEYS": ", ,"}, "DIPTYCH_GATEWAY_API_KEYS (not shown): holds no key; give"),
        (
            ["gateway"],
            {"DIPTYCH_GATEWAY_API_KEYS": "a:b,c:"},
            "DIPTYCH_GATEWAY_API_KEYS (not shown): a name has no key",
        ),
        (
            ["text-engine", "demo", "--max-model-len", "1"],
            {},
            "--max-model-len 1 is too small; give a whole number of",
        ),
        (
            ["gateway"],
            {"DIPTYCH_GATEWAY_API_KEYS": "[alpha, beta]"},
            "DIPTYCH_GATEWAY_API_KEYS (not shown): no key may begin or end with a bracket or quote; write keys as",
        ),
        (
            ["gateway", "--admin-keys", '"alpha"'],
            {},
            "--admin-keys (not shown): no key may begin or end with a bracket",
        ),
        (
            ["serve", "--speculative-model", "nosuch"],
            {},
            "--speculative-model nosuch: model 'nosuch' is neither a folder here",
        ),
        (
            ["text-engine", "demo"],
            {"DIPTYCH_ENGINE_SPECULATIVE_MODEL": "nosuch"},
            "DIPTYCH_ENGINE_SPECULATIVE_MODEL=nosuch: model 'nosuch' is neither",
        ),
        (["serve", "no-such-model"], {}, "model 'no-such-model' is neither a folder here"),
        (["serve", "--host", "192.0.2.1"], {}, "--host 192.0.2.1 is no address of this machine"),
        (["chat", "no-such.png", "What is it?"], {}, "there is no picture 'no-such.png'"),
        (["chat", "README.md"], {}, "the last word should be a question"),
        (["serve", "--port", "70000"], {}, "--port 70000 is too large; give a whole number from 1 to 65535"),
        (["serve"], {"DIPTYCH_GATEWAY_PORT": "0"}, "DIPTYCH_GATEWAY_PORT=0 is too small; give a whole number from 1"),
        (["chat", "--temperature", "hot", "Hi"], {}, "--temperature hot is not a number; give one from 0 to 2"),
        (["bench", "run", "--url", "a", "--api", "chat2"], {}, "--api chat2 is not one of completions, chat; did you"),
        (["no-such-command"], {}, "no-such-command"),
    ],
)
def test_a_bad_setting_ends_with_one_message_and_exit_code_2(
    run: Run, words: list[str], environment: dict[str, str], complaint: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    done = run(*(str(tmp_path) if word == "." else word for word in words), **environment)
    assert done.returncode == 2, done.stderr
    assert complaint in done.stderr
    if done.stderr.startswith("error: "):  # else it is the command line's own reader that complains
        assert done.stderr.splitlines()[-1].startswith(f"error: {complaint}")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("command", [["serve"], ["gateway"], ["vision-encoder", "demo"], ["text-engine", "demo"]])
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("DIPTYCH_ENGINE_MAX_MODEL_LENGHT", "DIPTYCH_ENGINE_MAX_MODEL_LEN"),
        ("DIPTYCH_GATWAY_API_KEYS", "DIPTYCH_GATEWAY_API_KEYS"),
        ("DIPTYCH_API_KEYS", "DIPTYCH_GATEWAY_API_KEYS"),
        ("DIPTYCH_API_KEYES", "DIPTYCH_GATEWAY_API_KEYS"),
        ("DIPTYCH_DTYPE", "DIPTYCH_ENCODER_DTYPE or DIPTYCH_ENGINE_DTYPE"),
        ("DIPTYCH_TLS_CERTFILE", "DIPTYCH_TLS_CERT_FILE"),
    ],
)
def test_a_misspelt_variable_is_pointed_out_once(run: Run, command: list[str], name: str, meant: str) -> None:
    done = run(*command, "--host", "192.0.2.1", **{name: "1000"})
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert warnings == [f"warning: the environment variable {name} is no setting and is ignored; did you mean {meant}?"]


def test_for_a_variable_that_is_like_no_other_nothing_is_proposed(run: Run) -> None:
    done = run("serve", "--host", "192.0.2.1", DIPTYCH_FOO="x")
    assert done.stderr.startswith("warning: the environment variable DIPTYCH_FOO is no setting and is ignored\n")


def test_no_variable_that_exists_is_taken_for_a_misspelt_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in known_variables():
        monkeypatch.setenv(name, "x")
    assert variables.unknown() == []


def test_serve_listens_where_the_gateways_variables_say_unless_a_flag_says_otherwise(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        here = {"DIPTYCH_GATEWAY_PORT": port, "DIPTYCH_GATEWAY_HOST": "127.0.0.1"}
        assert f"port {port} on 127.0.0.1 is taken" in run("serve", **here).stderr
        assert "--host 192.0.2.1 is no" in run("serve", **here | {"DIPTYCH_GATEWAY_HOST": "192.0.2.1"}).stderr
        elsewhere = {"DIPTYCH_GATEWAY_PORT": "1", "DIPTYCH_GATEWAY_HOST": "192.0.2.1"}
        assert f"port {port} on" in run("serve", "--host", "127.0.0.1", "--port", port, **elsewhere).stderr
    assert re.search(r"DIPTYCH_GATEWAY_PORT\).*default: 8000", run("serve", "--help").stdout)


def test_serve_names_the_variables_that_it_does_not_follow(run: Run) -> None:
    followed = {"DIPTYCH_ENGINE_MAX_NUM_SEQS": "7", "MODEL": "demo"}
    overruled = {
        "DIPTYCH_ENCODER_MODEL": "llava",
        "DIPTYCH_ENGINE_PORT": "9001",
        "DIPTYCH_GATEWAY_TEXT_ENGINES": "http://a:1",
    }
    done = run("serve", "demo", "--host", "192.0.2.1", **followed, **overruled)
    [warning, error] = done.stderr.splitlines()
    assert warning.startswith("warning: diptych serve sets these itself")
    assert warning.endswith(": DIPTYCH_ENCODER_MODEL, DIPTYCH_ENGINE_PORT, DIPTYCH_GATEWAY_TEXT_ENGINES")
    assert "--host" in error


@pytest.mark.parametrize("command", ["serve", "vision-encoder", "text-engine"])
@pytest.mark.parametrize("value", ["abc", "0", "99999", "-1", ",4"])
def test_a_number_of_threads_that_is_none_is_not_blamed_on_another_variable(run: Run, command: str, value: str) -> None:
    done = run(command, "no-such-model" if command == "serve" else "demo", OMP_NUM_THREADS=value)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: OMP_NUM_THREADS={value} is no number of threads; give a whole number from 1")


def test_a_flag_wins_over_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_ENGINE_MAX_NUM_SEQS", "7")
    assert options.build(TextEngineSettings, {"model": "."}).max_num_seqs == 7
    assert options.build(TextEngineSettings, {"model": ".", "max_num_seqs": "9"}).max_num_seqs == 9


def test_flags_survive_the_way_to_a_child_process() -> None:
    given = {"max_model_len": "2048", "enforce_eager": True, "enable_prefix_caching": False}
    assert options.as_flags(given) == ["--max-model-len=2048", "--enforce-eager", "--no-enable-prefix-caching"]


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "diptych", "--version"], cwd=ROOT, capture_output=True, check=True)
    assert done.stdout.startswith(b"diptych ")


def test_help_starts_without_torch() -> None:
    source = "import sys, diptych.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", source], cwd=ROOT, check=False).returncode == 0


def test_settings_are_checked_against_a_checkpoint_without_torch() -> None:
    source = (
        "import sys; from pathlib import Path; from services.text_engine.config import TextEngineSettings; "
        "from services.text_engine.preflight import check_settings; "
        "check_settings(TextEngineSettings(model=Path('models/demo/checkpoint'))); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", source], cwd=ROOT, check=False).returncode == 0


def test_importing_diptych_imports_nothing_heavy() -> None:
    source = "import sys, diptych; sys.exit(any(name in sys.modules for name in ('torch', 'httpx', 'pydantic')))"
    assert subprocess.run([sys.executable, "-c", source], cwd=ROOT, check=False).returncode == 0


def test_the_public_names_are_there() -> None:
    assert diptych.SamplingParams(max_tokens=5).max_tokens == 5
    assert diptych.Client.__name__ == "Client"
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        diptych.Nothing  # noqa: B018


def known_variables() -> set[str]:
    """Every environment variable of ours."""
    front_door = {"DIPTYCH_DEMO_MODEL", "DIPTYCH_CACHE", "DIPTYCH_SERVER", "DIPTYCH_API_KEY"}
    return front_door | {env_name(cls, name) for cls in SERVICES.values() for name in cls.model_fields}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_name_only_commands_variables_and_targets_that_exist(document: Path) -> None:
    text = document.read_text()
    targets = set(re.findall(r"^([a-z0-9]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in re.findall(r"`diptych ([a-z-]+)|^ +diptych ([a-z-]+)", text, re.MULTILINE):
        assert "".join(command) in COMMANDS
    for target in re.findall(r"`make ([a-z0-9]+)|^ +make ([a-z0-9]+)", text, re.MULTILINE):
        assert "".join(target) in targets
    assert set(re.findall(r"\bDIPTYCH_[A-Z_]+[A-Z]\b", text)) <= known_variables()


def test_the_compose_file_and_dockerfiles_set_only_variables_that_exist() -> None:
    files = [ROOT / "docker-compose.yml", *(ROOT / "services").glob("*/Dockerfile")]
    assert len(files) == 4
    for file in files:
        assert set(re.findall(r"\bDIPTYCH_[A-Z_]+[A-Z]\b", file.read_text())) <= known_variables()


def test_every_dependency_has_its_line() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(one for many in project["optional-dependencies"].values() for one in many)]
    explained = (ROOT / "docs" / "dependencies.md").read_text()
    for requirement in wanted:
        name = re.split(r"[\[<>=; ]", requirement)[0]
        assert name == "diptych" or re.search(rf"\b{re.escape(name)}\b", explained), name


def test_the_last_word_is_the_question(tmp_path: Path) -> None:
    picture = tmp_path / "cat.png"
    picture.touch()
    assert split_words([str(picture), "https://example.com/a.jpg", "Same?"]) == (
        [str(picture), "https://example.com/a.jpg"],
        "Same?",
    )
    assert split_words(["Hello"]) == ([], "Hello")
    with pytest.raises(BadSetting, match="the last word should be a question"):
        split_words(["What is it?", str(picture)])


def test_a_running_servers_model_answers_unless_another_is_asked_for() -> None:
    assert choose_model(["demo", "sql"], None, "http://here") == "demo"
    assert choose_model(["demo", "sql"], "sql", "http://here") == "sql"
    with pytest.raises(BadSetting, match=r"--model llava is not served at http://here, which serves demo, sql; "):
        choose_model(["demo", "sql"], "llava", "http://here")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["examples/openai_client.py", "README.md"], "error: no server answers at http://127.0.0.1:1/v1; start one"),
        (["examples/openai_client.py", "none.png"], "error: none.png cannot be read: No such file or directory"),
        (["examples/openai_client.py"], "usage: python examples/openai_client.py FILE"),
        (["examples/offline.py", "none"], "error: none is no folder here; "),
    ],
)
def test_an_example_that_cannot_run_says_why_in_one_line(words: list[str], said: str) -> None:
    source = Path(ROOT / words[0]).read_text().replace("http://127.0.0.1:8000", "http://127.0.0.1:1")
    command = [sys.executable, "-c", source, *words[1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith(said)


def test_answers_are_compared_without_case_punctuation_and_articles() -> None:
    assert normal("A red circle.") == normal("red circle")
    assert normal("It is a cat") != normal("a cat")
