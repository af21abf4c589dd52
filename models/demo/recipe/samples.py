"""Sample pictures of the evaluation split, one of each kind, with questions and the expected answers.

The first seed whose scene fits the wish is taken, before the model has seen any of them.
"""
import json
import random
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from .drawing import Assets
from .questions import questions
from .scenes import Scene, render

# file, scene kind, what the scene must be, kinds of question
WISHES: tuple[tuple[str, str, Callable[[Scene], bool], tuple[str, ...]], ...] = (
    ("animal.png", "pictogram", lambda s: s.things[0].name == "cat" and s.background == "white", ("what", "category", "yesno_pictogram")),
    ("vehicle.png", "pictogram", lambda s: s.things[0].name == "sailboat" and bool(s.background), ("what", "background", "describe")),
    ("food.png", "pictogram", lambda s: s.things[0].name == "pizza", ("what", "category")),
    ("shapes.png", "shapes", lambda s: len(s.things) == 3 and len({t.name for t in s.things}) == 3, ("colour", "relation", "yesno_shape")),
    ("count.png", "shapes", lambda s: len(s.things) == 5 and len({t.name for t in s.things}) < 4, ("count", "count_some", "background")),
    ("number.png", "text", lambda s: s.things[0].type == "number" and len(s.things[0].name) == 4, ("read", "text_colour")),
    ("word.png", "text", lambda s: s.things[0].type == "word" and len(s.things[0].name) == 4, ("read", "text_kind")),
    ("several.png", "several", lambda s: len(s.things) == 2 and bool(s.background), ("what_all", "count", "relation")),
)
SCALE = 3


def make(assets: Assets, out: Path) -> None:
    """Write the pictures and samples.json."""
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for i, (file, kind, fits, asks) in enumerate(WISHES):
        seed = 2 * 10**8 + 10**4 * i
        while True:
            picture, scene = render(assets, seed, "eval", kind)
            asked = {q.kind: q for q in questions(scene, random.Random(seed))}
            if fits(scene) and all(k in asked for k in asks):
                break
            seed += 1
        size = (picture.width * SCALE, picture.height * SCALE)
        picture.resize(size, Image.Resampling.LANCZOS).save(out / file, optimize=True)
        pairs = [{"question": asked[k].text, "answer": asked[k].answer.strip("\x01\x02")} for k in asks]
        rows.append({"file": file, "about": file.removesuffix(".png"), "questions": pairs})
    (out / "samples.json").write_text(json.dumps(rows, indent=1) + "\n")
