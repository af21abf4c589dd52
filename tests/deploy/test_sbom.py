"""The bill of materials says what is installed: held against the lock file and the metadata of this environment."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SBOM = runpy.run_path(str(ROOT / "deploy" / "sbom.py"))


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    done = subprocess.run([sys.executable, ROOT / "deploy" / "sbom.py"], capture_output=True, text=True, check=True)
    made: dict[str, Any] = json.loads(done.stdout)
    return made


def locked() -> dict[str, str]:
    """Name -> version of the lock file's packages that are installed here; some are of other platforms."""
    found = {}
    for name in re.findall(r"^([A-Za-z0-9._-]+)(?:\[.*\])?==", (ROOT / "requirements.lock").read_text(), re.MULTILINE):
        try:
            found[SBOM["canonical"](name)] = version(name)
        except PackageNotFoundError:
            continue
    return found


def test_everything_that_the_project_names_is_in_the_lock_file():
    """But for clients that no set-up installs. What is missing was perhaps installed by hand where it was added."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    groups = [project["dependencies"], *(extras[name] for name in extras if name != "clients")]
    wanted = {SBOM["canonical"](re.split(r"[\[<>=;~! ]", named)[0]) for group in groups for named in group}
    lines = (ROOT / "requirements.lock").read_text()
    there = {SBOM["canonical"](name) for name in re.findall(r"^([A-Za-z0-9._-]+)(?:\[.*\])?==", lines, re.MULTILINE)}
    assert wanted - there <= {"torch", "diptych"}  # the one is installed before, the other is what it is all for


def test_every_installed_package_of_the_lock_file_is_named_with_its_version_and_licence(document: dict[str, Any]):
    components = {each["name"]: each for each in document["components"]}
    assert len(locked()) > 50
    for name, number in locked().items():
        assert components[name]["version"] == number
        assert components[name]["purl"] == f"pkg:pypi/{name}@{number}"
        [said] = components[name]["licenses"]
        assert said.get("expression") or said["license"]["name"]


def test_the_document_is_cyclonedx_in_itself(document: dict[str, Any]):
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.5")
    own = document["metadata"]["component"]["bom-ref"]
    references = [own, *(each["bom-ref"] for each in document["components"])]
    assert len(references) == len(set(references))
    depends = {each["ref"]: each["dependsOn"] for each in document["dependencies"]}
    assert set(depends) == set(references)
    assert {other for others in depends.values() for other in others} <= set(references)
    assert f"pkg:pypi/httpx@{version('httpx')}" in depends[own]


def test_no_package_comes_under_a_licence_that_spreads_to_what_uses_it(document: dict[str, Any]):
    """What a service imports; MPL covers its own files only."""
    spreading = re.compile(r"\b(A?GPL|SSPL|BUSL|CC-BY-NC)", re.IGNORECASE)
    assert [each["name"] for each in document["components"] if spreading.search(json.dumps(each.get("licenses")))] == []


def test_the_gateways_image_has_no_torch_and_the_panels_have(document: dict[str, Any]):
    names = {
        image: {each.metadata["Name"].lower() for each in SBOM["needed"](extras)}
        for image, extras in SBOM["ROOTS"].items()
    }
    assert {"fastapi", "httpx", "diptych", "opentelemetry-sdk"} <= names["gateway"]
    assert "torch" not in names["gateway"]
    assert "torch" in names["text-engine"]
    for image, extras in SBOM["ROOTS"].items():
        dockerfile = (ROOT / "services" / image.replace("-", "_") / "Dockerfile").read_text()
        assert f'".[{",".join(extras)}]"' in dockerfile


def test_the_same_packages_make_the_same_document():
    assert SBOM["bill"](SBOM["installed"]()) == SBOM["bill"](list(reversed(SBOM["installed"]()))[::-1])
