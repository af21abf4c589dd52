"""The kinds of preprocessing there are, and their way to the decode workers and back."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, Final

from services.vision_encoder.preprocessing.anyres import AnyRes
from services.vision_encoder.preprocessing.interface import Preprocessing
from services.vision_encoder.preprocessing.native_resolution import WithinBox, WithinBudget
from services.vision_encoder.preprocessing.single_tile import SingleTile
from services.vision_encoder.preprocessing.split_tiles import SplitTiles
from services.vision_encoder.preprocessing.stretched_tiles import StretchedTiles

KINDS: Final[dict[str, type[Preprocessing]]] = {
    "AnyRes": AnyRes,
    "SingleTile": SingleTile,
    "SplitTiles": SplitTiles,
    "StretchedTiles": StretchedTiles,
    "WithinBox": WithinBox,
    "WithinBudget": WithinBudget,
}


def to_json(preprocessing: Preprocessing) -> str:
    """Canonical: equal preprocessing gives equal text."""
    return json.dumps({"kind": type(preprocessing).__name__, "fields": asdict(preprocessing)}, sort_keys=True)


def from_json(text: str) -> Preprocessing:
    parsed = json.loads(text)
    return KINDS[parsed["kind"]](**{name: _frozen(value) for name, value in parsed["fields"].items()})


def _frozen(value: Any) -> Any:
    """JSON knows lists only; the dataclasses hold tuples, so that what came back equals what was sent."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
