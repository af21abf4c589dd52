"""A release: one version everywhere, packages that hold what they should, checksums that hold."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
RELEASE: dict[str, Any] = runpy.run_path(str(ROOT / "deploy" / "release.py"))
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
in_a_repository = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs git to say what belongs to it")


def test_the_chart_has_the_projects_version():
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "diptych" / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)


@in_a_repository
def test_packages_hold_every_module_and_nothing_of_tests(tmp_path: Path):
    RELEASE["build_packages"](tmp_path)
    [wheel] = tmp_path.glob(f"diptych-{VERSION}-*.whl")
    [source] = tmp_path.glob(f"diptych-{VERSION}.tar.gz")
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {
        str(file.relative_to(ROOT))
        for package in ("diptych", "services", "shared")
        for file in (ROOT / package).rglob("*.py")
        if "node_modules" not in file.parts
    }
    assert modules - names == set()
    assert "services/gateway/web/index.html" in names
    assert not any(name.startswith(("tests/", "bench/")) for name in names)
    with tarfile.open(source) as archive:
        assert f"diptych-{VERSION}/pyproject.toml" in archive.getnames()


def test_images_are_labelled_and_tagged_with_the_version_and_the_script_is_shell(tmp_path: Path):
    script = RELEASE["image_commands"]("1.2.3", "abc")
    commands = [line for line in script.splitlines() if line.startswith("docker build")]
    assert len(commands) == 3
    for command in commands:
        assert "--label org.opencontainers.image.version=1.2.3" in command
        assert "--label org.opencontainers.image.revision=abc" in command
        assert re.search(r'--tag "\$\{PREFIX:-\}diptych-[a-z-]+:1\.2\.3" \.$', command)
        [dockerfile] = re.findall(r"--file (\S+)", command)
        assert (ROOT / dockerfile).exists()
    (tmp_path / "script").write_text(script)
    assert subprocess.run(["sh", "-n", tmp_path / "script"]).returncode == 0


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="no sha256sum")
def test_sha256sum_accepts_the_checksums_and_notices_a_change(tmp_path: Path):
    (tmp_path / "a.whl").write_bytes(b"a")
    (tmp_path / "SHA256SUMS").write_text(RELEASE["checksums"](tmp_path))
    check = ["sha256sum", "--check", "--status", "SHA256SUMS"]
    assert subprocess.run(check, cwd=tmp_path).returncode == 0
    (tmp_path / "a.whl").write_bytes(b"b")
    assert subprocess.run(check, cwd=tmp_path).returncode == 1


@in_a_repository
def test_a_tree_with_changes_is_refused(tmp_path: Path):
    copy = tmp_path / "copy"
    (copy / "deploy" / "helm" / "diptych").mkdir(parents=True)
    for name in ("deploy/release.py", "deploy/helm/diptych/Chart.yaml", "pyproject.toml"):
        shutil.copy(ROOT / name, copy / name)
    subprocess.run(["git", "init", "--quiet"], cwd=copy, check=True)
    done = subprocess.run([sys.executable, "deploy/release.py"], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 1
    assert "files are not committed" in done.stderr
    assert not (copy / "dist").exists()
