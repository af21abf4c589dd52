"""Case E9, the part that needs no server: nothing of ours can unpickle what somebody else has written."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [file for folder in ("shared", "services", "diptych") for file in sorted((ROOT / folder).rglob("*.py"))]
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
# They unpickle whatever they are given.
CALLS = {"recv_pyobj", "broadcast_object_list", "recv_object_list", "scatter_object_list", "all_gather_object"}


def unpicklers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name.partition(".")[0] in UNPICKLERS)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in UNPICKLERS:
                yield module
            case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
                yield "torch.load"
            case ast.Attribute(attr=attribute) if attribute in CALLS:
                yield attribute


def test_no_module_can_unpickle():
    assert len(SOURCES) > 100
    found = {str(file.relative_to(ROOT)): list(unpicklers(ast.parse(file.read_text()))) for file in SOURCES}
    assert {file: names for file, names in found.items() if names} == {}


def test_what_unpickles_would_be_found():
    source = "import pickle\nfrom dill import loads\ntorch.load(x)\nsocket.recv_pyobj()\nsafetensors.torch.load(x)"
    assert sorted(unpicklers(ast.parse(source))) == ["dill", "pickle", "recv_pyobj", "torch.load"]
