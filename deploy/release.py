"""A release in dist/: source archive, wheel, chart, the images' build commands, bills of materials, checksums.

    python deploy/release.py                   of a tree in which everything is committed
    python deploy/release.py --allow-dirty     of the tree as it is, for a trial

Builds from a copy of what git knows, so that nothing left over from earlier builds gets in. Uploads nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Final

import yaml

ROOT: Final = Path(__file__).resolve().parents[1]
DIST: Final = ROOT / "dist"
CHART: Final = ROOT / "deploy" / "helm" / "diptych"
SERVICES: Final = ("gateway", "vision_encoder", "text_engine")


class ReleaseRefused(Exception):
    """The tree is not what a release may be made of; the message says why."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--allow-dirty", action="store_true", help="even with changes that are not committed")
    given = parser.parse_args(argv)
    try:
        version = checked_version(allow_dirty=given.allow_dirty)
    except ReleaseRefused as error:
        print("error:", error, file=sys.stderr)
        return 1
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    build_packages(DIST)
    if shutil.which("helm"):
        subprocess.run(["helm", "package", CHART, "--destination", DIST], check=True, stdout=subprocess.DEVNULL)
    script = DIST / "build-images.sh"
    script.write_text(image_commands(version, _git("rev-parse", "HEAD")))
    script.chmod(0o755)
    for service in SERVICES:
        name = service.replace("_", "-")
        bill = [sys.executable, ROOT / "deploy" / "sbom.py", "--roots", name]
        (DIST / f"sbom-{name}.json").write_bytes(subprocess.run(bill, check=True, capture_output=True).stdout)
    (DIST / "SHA256SUMS").write_text(checksums(DIST))
    for file in sorted(DIST.iterdir()):
        print(f"{file.stat().st_size:>12,}  {file.relative_to(ROOT)}")
    return 0


def checked_version(*, allow_dirty: bool) -> str:
    """The version of pyproject.toml. Raises ReleaseRefused if something else says another or is not committed."""
    version: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    for name in ("version", "appVersion"):
        if chart[name] != version:
            raise ReleaseRefused(f"pyproject.toml is version {version}, the chart's {name} is {chart[name]}")
    if not allow_dirty and (changes := _git("status", "--porcelain")):
        raise ReleaseRefused(f"{len(changes.splitlines())} files are not committed; --allow-dirty for a trial")
    if not allow_dirty and f"## {version}" not in (ROOT / "CHANGELOG.md").read_text():
        raise ReleaseRefused(f"CHANGELOG.md has no section '## {version}': what is Unreleased belongs there now")
    return version


def build_packages(destination: Path) -> None:
    """Source archive and wheel, their files stamped with the commit's time."""
    stamp = int(_git("log", "-1", "--format=%ct"))
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        for path in _git("ls-files", "--cached", "--others", "--exclude-standard").splitlines():
            source, target = ROOT / path, copy / path
            if source.is_file():  # a file that was removed is still known until that is committed
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
                os.utime(target, (stamp, stamp))
        code = (
            "import sys; from setuptools import build_meta as b; to = sys.argv[1]; b.build_sdist(to); b.build_wheel(to)"
        )
        environment = {**os.environ, "SOURCE_DATE_EPOCH": str(stamp)}
        command = [sys.executable, "-c", code, destination]
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)


def image_commands(version: str, commit: str) -> str:
    """A shell script, to be run in the repository's root; PREFIX names a registry, with its slash."""
    lines = ["#!/bin/sh", "# PREFIX=registry.example.com/team/ TORCH_ARGS=… sh dist/build-images.sh", "set -eu"]
    labels = {
        "org.opencontainers.image.version": version,
        "org.opencontainers.image.revision": commit,
        "org.opencontainers.image.licenses": "Apache-2.0",
    }
    for service in SERVICES:
        name = "diptych-" + service.replace("_", "-")
        words = ["docker", "build", "--file", f"services/{service}/Dockerfile"]
        for label, value in labels.items():
            words += ["--label", f"{label}={value}"]
        words += ["--label", f"org.opencontainers.image.title={name}"]
        torch = "" if service == "gateway" else ' --build-arg "TORCH_ARGS=${TORCH_ARGS:-}"'
        lines.append(f'{shlex.join(words)}{torch} --tag "${{PREFIX:-}}{name}:{version}" .')
    return "\n".join(lines) + "\n"


def checksums(folder: Path) -> str:
    """As `sha256sum --check` reads them."""
    files = [file for file in sorted(folder.iterdir()) if file.name != "SHA256SUMS"]
    return "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
