"""What goes into the images and how they run: read from the Dockerfiles, the ignore file and the compose file."""

from __future__ import annotations

import re
import shlex
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = sorted((ROOT / "services").glob("*/Dockerfile"))
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SECRETS = re.compile(r"TOKEN|KEY|SECRET|PASSWORD", re.IGNORECASE)


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """(instruction, the rest), continued lines joined, comments left out."""
    text = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE))
    return [
        (word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines()) if word
    ]


def is_ignored(path: str) -> bool:
    """As Docker reads .dockerignore: the last pattern that matches the path, or a folder above it, decides."""
    ignored = False
    parts = path.split("/")
    above = ["/".join(parts[: depth + 1]) for depth in range(len(parts))]
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!").removeprefix("**/")
        names = [name.rpartition("/")[2] for name in above] if "**/" in line else above
        if any(fnmatch(name, pattern) and name.count("/") == pattern.count("/") for name in names):
            ignored = not line.startswith("!")
    return ignored


@pytest.mark.parametrize(
    "path",
    [
        ".git/config",
        ".env",
        ".venv/bin/python",
        "docker-compose.override.yml",
        "models/my-llava/model.safetensors",
        "services/gateway/Dockerfile",
        "services/text_engine/__pycache__/app.pyc",
        "services/text_engine/kernels/native/kernels.so",
        "tests/unit/test_log.py",
        "id_rsa",
    ],
)
def test_what_is_no_source_stays_out_of_every_image(path: str):
    assert is_ignored(path)


def test_everything_that_the_dockerfiles_copy_is_let_in():
    for dockerfile in DOCKERFILES:
        for word, rest in instructions(dockerfile):
            if word in ("COPY", "ADD") and "--from" not in rest:
                for source in [each for each in shlex.split(rest) if not each.startswith("--")][:-1]:
                    assert (ROOT / source).exists(), (dockerfile, source)
                    assert not is_ignored(source), (dockerfile, source)


def test_no_file_that_git_ignores_is_let_in():
    ignored = (ROOT / ".gitignore").read_text().split()
    assert ".env" in ignored
    for name in ignored:
        path = name.rstrip("/").replace("*", "x")
        assert is_ignored(path), name


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_an_image_runs_as_a_numbered_user_from_a_named_base_and_carries_no_secret(dockerfile: Path):
    found = instructions(dockerfile)
    bases = [rest.split(" ")[0] for word, rest in found if word == "FROM"]
    stages = {rest.rpartition(" ")[2] for word, rest in found if word == "FROM" and " AS " in rest}
    for base in bases:
        assert base in stages or re.fullmatch(r"[a-z/-]+:[0-9][\w.-]*", base), f"{base} may be another image tomorrow"
    last_stage = found[max(i for i, (word, _) in enumerate(found) if word == "FROM") :]
    [user] = [rest for word, rest in last_stage if word == "USER"]
    assert user.isdecimal()  # a name could not be checked by Kubernetes' runAsNonRoot
    assert int(user) >= 10_000
    after = [word for word, _ in last_stage][[word for word, _ in last_stage].index("USER") :]
    assert not {"RUN", "COPY", "ADD", "USER"} & set(after[1:])
    assert not [rest for word, rest in found if word in ("ENV", "ARG") and SECRETS.search(rest)]
    assert not [rest for word, rest in found if word == "ADD"]  # it would fetch and unpack
    [entry] = [rest for word, rest in last_stage if word == "ENTRYPOINT"]
    assert entry.startswith("[")  # no shell between it and signals


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_a_container_has_no_rights_that_it_does_not_need(name: str):
    service = COMPOSE["services"][name]
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert not service.get("privileged")
    assert service.get("user") not in ("root", "0")
    for published in service.get("ports", []):
        assert published.startswith(("127.0.0.1:", "${ADDRESS:-127.0.0.1}:")), "open to the network unasked"
    assert not any("docker.sock" in str(volume) for volume in service.get("volumes", []))
    if "image" in service and "build" not in service:
        assert re.search(r":[v0-9]", service["image"]), "a tag that says a version"


def test_secrets_reach_containers_from_env_and_only_those_that_need_them():
    services = COMPOSE["services"]
    for name in ("gateway", "vision_encoder", "text_engine"):
        values = services[name]["environment"]
        assert values["DIPTYCH_SERVICE_TOKEN"] == "${DIPTYCH_SERVICE_TOKEN:-}"
        assert all(not value or value.startswith("${") for key, value in values.items() if SECRETS.search(key))
    assert services["gateway"]["environment"]["HF_TOKEN"] == ""
    assert not any("DIPTYCH_SERVICE_TOKEN" in str(services[name].get("environment")) for name in ("redis", "grafana"))


def test_no_secret_is_in_the_repository():
    """Shapes of keys that services hand out; examples in documents and tests are none of them."""
    shapes = "-----BEGIN [A-Z ]*PRIVATE KEY-----$|AKIA[0-9A-Z]{16}|(ghp_|hf_|sk-)[A-Za-z0-9]{34}"
    done = subprocess.run(
        ["git", "grep", "--untracked", "-IlE", "-e", shapes, "--", ".", ":!tests/deploy/test_images.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode > 1:
        pytest.skip("no git repository here")
    assert done.stdout == ""
