"""The bill of materials of an installation: every package, its version, licence and origin, as CycloneDX JSON.

    python deploy/sbom.py                      all that this environment has installed, on standard output
    python deploy/sbom.py --licences           a table of name, version and licence, for people
    python deploy/sbom.py --roots gateway      only what one of the images has: gateway, vision-encoder, text-engine

Read from the metadata of the installed packages, so it says what is there, not what was meant to be; no network.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import Any, Final

PROJECT: Final = "diptych"
PYPROJECT: Final = Path(__file__).resolve().parents[1] / "pyproject.toml"
# What the Dockerfiles install.
ROOTS: Final = {
    "gateway": ("otel",),
    "vision-encoder": ("vision-encoder", "text-engine", "otel"),
    "text-engine": ("vision-encoder", "text-engine", "otel"),
}
_CLASSIFIER: Final = "License :: "
# Trove's words for the licences that packages without an SPDX expression have, by SPDX identifier.
_SPDX: Final = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
}
_REQUIREMENT: Final = re.compile(r"\s*([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?[^;]*(?:;(.*))?")
_EXTRA: Final = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")


def canonical(name: str) -> str:
    """As the package index compares names: My_Package -> my-package"""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> list[Distribution]:
    """Each package once, by name; the first on the path is the one that is imported."""
    found: dict[str, Distribution] = {}
    for each in distributions():
        found.setdefault(canonical(each.metadata["Name"]), each)
    return [found[name] for name in sorted(found)]


def needed(extras: Sequence[str]) -> list[Distribution]:
    """The installed packages that `diptych` with these extras reaches; those of other platforms are not installed."""
    found: dict[str, Distribution] = {}
    frontier = [(PROJECT, frozenset(extras))]
    seen = set()
    while frontier:
        name, wanted = frontier.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        try:
            each = distribution(name)
        except PackageNotFoundError:
            continue
        found[canonical(name)] = each
        frontier += requirements(each, wanted)
    return [found[name] for name in sorted(found)]


def requirements(package: Distribution, extras: Iterable[str]) -> list[tuple[str, frozenset[str]]]:
    """(name, extras) of each direct dependency."""
    found = []
    for line in _own_requirements() if canonical(package.metadata["Name"]) == PROJECT else package.requires or []:
        match = _REQUIREMENT.match(line)
        assert match is not None, line
        name, inner, marker = match.groups()
        extra = _EXTRA.search(marker or "")
        if extra is None or extra.group(1) in extras:
            found.append(
                (canonical(name), frozenset(each.strip() for each in (inner or "").split(",") if each.strip()))
            )
    return found


def _own_requirements() -> list[str]:
    """From pyproject.toml, which an installation for development does not copy again with every change."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    of_extras = (
        f"{line}{' and' if ';' in line else ';'} extra == '{extra}'"
        for extra, lines in project["optional-dependencies"].items()
        for line in lines
    )
    return [*project["dependencies"], *of_extras]


def licence(package: Distribution) -> str:
    """An SPDX expression where the package or its classifiers say one, else its own words, or the title of its licence
    file; "" if it says nothing."""
    metadata = package.metadata
    if expression := metadata.get("License-Expression"):
        return str(expression)
    classifiers = [line.rpartition(" :: ")[2] for line in metadata.get_all("Classifier") or [] if _CLASSIFIER in line]
    known = [_SPDX.get(name, name) for name in classifiers if name != "OSI Approved"]
    if known:
        return " OR ".join(dict.fromkeys(known))
    files = metadata.get_all("License-File") or []
    texts = [metadata.get("License"), *(package.read_text(f"licenses/{file}") for file in files)]
    return next((text.strip().splitlines()[0].strip() for text in texts if text and text.strip()), "")


def component(package: Distribution) -> dict[str, Any]:
    name, version = canonical(package.metadata["Name"]), package.version
    purl = f"pkg:pypi/{name}@{version}"
    made: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    if text := licence(package):
        is_spdx = bool(package.metadata.get("License-Expression")) or text in _SPDX.values()
        made["licenses"] = [{"expression": text} if is_spdx else {"license": {"name": text}}]
    urls = [line.partition(",")[2].strip() for line in package.metadata.get_all("Project-URL") or []]
    home = package.metadata.get("Home-page") or next(iter(urls), None)
    if home:
        made["externalReferences"] = [{"type": "website", "url": home}]
    return made


def bill(packages: Sequence[Distribution]) -> dict[str, Any]:
    """The same packages make the same document, to the byte: it has no time and no serial number."""
    references = {canonical(each.metadata["Name"]): component(each)["bom-ref"] for each in packages}
    own = references.get(PROJECT)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {**component(distribution(PROJECT)), "type": "application"},
            "properties": [{"name": "python", "value": ".".join(map(str, sys.version_info[:3]))}],
        },
        "components": [component(each) for each in packages if references[canonical(each.metadata["Name"])] != own],
        "dependencies": [
            {
                "ref": references[name],
                "dependsOn": sorted({references[other] for other, _ in requirements(each, ()) if other in references}),
            }
            for name, each in ((canonical(each.metadata["Name"]), each) for each in packages)
        ],
    }


def table(packages: Sequence[Distribution]) -> str:
    rows = [(canonical(each.metadata["Name"]), each.version, licence(each) or "not stated") for each in packages]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"{name:{widths[0]}}  {version:{widths[1]}}  {text}" for name, version, text in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Bill of materials of the installed packages, as CycloneDX JSON.")
    parser.add_argument("--licences", action="store_true", help="a table of licences instead")
    parser.add_argument("--roots", choices=sorted(ROOTS), help="only what this image has installed")
    options = parser.parse_args()
    packages = needed(ROOTS[options.roots]) if options.roots else installed()
    sys.stdout.write((table(packages) if options.licences else json.dumps(bill(packages), indent=2)) + "\n")


if __name__ == "__main__":
    main()
