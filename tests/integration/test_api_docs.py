"""`docs/api.md` is true: it names every path, its examples run, and its table has every error as the code has it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared import errors
from shared.errors import DiptychError
from tests.gateway_stack import Stack, running_stack

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "api.md").read_text()
ADDRESS = "http://127.0.0.1:8000"
ERRORS = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, DiptychError)]
# So that a refused example fails.
STRICT_CURL = 'curl() { command curl --silent --show-error --fail-with-body --noproxy "*" "$@"; }\n'


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running_stack() as running:
        yield running


def examples(language: str, stack: Stack) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```$", DOC, re.DOTALL | re.MULTILINE)
    assert found
    return [example.replace(ADDRESS, stack.url) for example in found]


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_path_of_the_openapi_document_has_its_heading_and_example(stack: Stack):
    paths = stack.http.get("/openapi.json").json()["paths"]
    operations = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    sections = dict(re.findall(r"^## `(.+?)`\n(.*?)(?=^## )", DOC, re.DOTALL | re.MULTILINE))
    assert sections.keys() == operations
    for operation, section in sections.items():
        method, path = operation.split()
        assert re.search(re.sub(r"\{\w+\}", r"\\$\\w+", ADDRESS + path), section), f"{operation} has no example"
        assert method != "DELETE" or "-X DELETE" in section


@pytest.mark.skipif(not all(map(shutil.which, ("bash", "curl", "jq"))), reason="bash, curl and jq are needed")
def test_the_examples_in_the_shell_run_one_after_the_other(stack: Stack):
    stack.reset()
    run("bash", "-euxo", "pipefail", "-c", STRICT_CURL + "\n".join(examples("sh", stack)))
    assert any(
        part.type == "image" for request in stack.engine.requests for m in request.messages or () for part in m.content
    )


def test_the_examples_in_python_run(stack: Stack):
    for example in examples("python", stack):
        assert run(sys.executable, "-c", example)


def test_the_table_has_every_error_and_no_other():
    _, _, table = DOC.partition("\n## Errors\n")
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line.startswith("| `")
    ]
    assert all(len(row) == 6 and all(row) for row in rows)
    documented = [tuple(row[:4]) for row in rows]
    assert sorted(documented) == sorted((cls.__name__, str(cls.status), cls.type, cls.code) for cls in ERRORS)
