"""Dense labels: what each of the 64 patches of a picture shows, as numbers.  The tower learns to tell them."""
from dataclasses import dataclass

import numpy as np

from .concepts import CATEGORIES, CHARS, COLOUR_NAMES, SHAPES
from .drawing import SIZE
from .scenes import CATEGORY, NAMES, Scene, Thing
from .words import MAX_LETTERS

PATCH = 16
GRID = SIZE // PATCH
NUM_PATCHES = GRID * GRID
CLASSES = ["background", "text", *SHAPES, *NAMES]
CLASS_ID = {name: i for i, name in enumerate(CLASSES)}
MAX_THINGS = 5
# One value a patch and attribute; -1 where an attribute says nothing.
ATTRIBUTES = {
    "class": len(CLASSES), "category": len(CATEGORIES), "colour": len(COLOUR_NAMES), "column": 3, "row": 3,
    "rank_x": MAX_THINGS, "rank_y": MAX_THINGS, "same_name": MAX_THINGS, "same_colour": MAX_THINGS, "text_kind": 2, "size": 2,
    "count": MAX_THINGS,
}
ATTRIBUTE_ID = {name: i for i, name in enumerate(ATTRIBUTES)}
EDGES = (SIZE * 0.36, SIZE * 0.64)


@dataclass(slots=True)
class Labels:
    """attributes [64, 12] int16; geometry [64, 4] centre and size of the patch's thing as parts of the picture, NaN for none;
    chars, order [64, 2] the up to two characters over a patch and their places in the text, -1 for none; share [64, 2] weights.
    """

    attributes: np.ndarray
    geometry: np.ndarray
    chars: np.ndarray
    order: np.ndarray
    share: np.ndarray


def third(x: float) -> int:
    """0, 1 or 2: which third of the picture a coordinate lies in."""
    return 0 if x < EDGES[0] else 2 if x > EDGES[1] else 1


def extremes(things: list[Thing]) -> tuple[Thing | None, Thing | None]:
    """The clearly biggest and the clearly smallest thing, if there are such."""
    order = sorted(things, key=lambda t: -t.radius)
    if len(order) < 2:
        return None, None
    biggest = order[0] if order[0].radius > order[1].radius * 1.25 else None
    smallest = order[-1] if order[-1].radius * 1.25 < order[-2].radius else None
    return biggest, smallest


def thing_attributes(scene: Scene, thing: Thing) -> list[int]:
    """The attribute values of all patches of a thing; see ATTRIBUTES."""
    things = scene.things
    cx, cy = thing.centre
    biggest, smallest = extremes(things)
    return [
        CLASS_ID["text" if thing.is_text else thing.name],
        CATEGORIES.index(CATEGORY[thing.name]) if thing.type == "pictogram" else -1,
        COLOUR_NAMES.index(thing.colour) if thing.colour else -1,
        third(cx), third(cy),
        sum(t.centre[0] < cx for t in things), sum(t.centre[1] < cy for t in things),
        sum(t.name == thing.name for t in things) - 1,
        sum(t.colour == thing.colour for t in things) - 1 if thing.colour else -1,
        ("number", "word").index(thing.type) if thing.is_text else -1,
        0 if thing is biggest else 1 if thing is smallest else -1,
        len(things) - 1,
    ]


def covered(low: float, high: float) -> list[int]:
    """Patches of one axis whose middle lies between two coordinates; the nearest one if none does."""
    inside = [i for i in range(GRID) if low <= i * PATCH + PATCH / 2 <= high]
    return inside or [min(GRID - 1, max(0, int((low + high) / 2) // PATCH))]


def label_text(labels: Labels, thing: Thing, columns: list[int], rows: list[int]) -> None:
    """Which characters lie over each patch of a text."""
    for x in columns:
        over = []
        for i, (char, left, right) in enumerate(thing.spans):
            width = min(right, x * PATCH + PATCH) - max(left, x * PATCH)
            if width > 1:
                over.append((width, CHARS.find(char.upper()), min(i, MAX_LETTERS - 1)))
        over = sorted(over, reverse=True)[:2]
        for y in rows:
            for k, (width, char_id, i) in enumerate(over):
                at = y * GRID + x
                labels.chars[at, k], labels.order[at, k] = char_id, i
                labels.share[at, k] = width / sum(w for w, _c, _i in over)


def dense_labels(scene: Scene) -> Labels:
    """The labels of a scene's picture."""
    labels = Labels(
        np.full((NUM_PATCHES, len(ATTRIBUTES)), -1, np.int16), np.full((NUM_PATCHES, 4), np.nan, np.float16),
        np.full((NUM_PATCHES, 2), -1, np.int8), np.full((NUM_PATCHES, 2), -1, np.int8), np.zeros((NUM_PATCHES, 2), np.float16))
    labels.attributes[:, ATTRIBUTE_ID["class"]] = 0
    labels.attributes[:, ATTRIBUTE_ID["count"]] = len(scene.things) - 1
    if scene.background:
        labels.attributes[:, ATTRIBUTE_ID["colour"]] = COLOUR_NAMES.index(scene.background)
    for thing in scene.things:
        x0, y0, x1, y1 = thing.box
        sx, sy = (-3, -3) if thing.is_text else ((x1 - x0) * 0.08, (y1 - y0) * 0.08)
        columns, rows = covered(x0 + sx, x1 - sx), covered(y0 + sy, y1 - sy)
        at = [y * GRID + x for y in rows for x in columns]
        labels.attributes[at] = thing_attributes(scene, thing)
        labels.geometry[at] = np.array([(x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0]) / SIZE
        if thing.is_text:
            label_text(labels, thing, columns, rows)
    return labels
