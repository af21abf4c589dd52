"""Questions with their answers, made from what a scene shows.

In an answer, \\x01 ... \\x02 marks a literal text, which the tokenizer writes one character a token.
"""
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

from . import phrases
from .concepts import (
    CANT,
    CATEGORY_ANSWER,
    COLOUR_NAMES,
    SHAPES,
    is_plural,
    with_article,
)
from .drawing import SIZE
from .labels import EDGES, extremes, third
from .phrases import pick
from .scenes import CATEGORY, NAMES, Scene, Thing

PLACES = (("top left", "top", "top right"), ("left", "center", "right"), ("bottom left", "bottom", "bottom right"))
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
WORDINGS = {"left of": ("to the left of", "left of", "on the left of"), "right of": ("to the right of", "right of", "on the right of"),
            "above": ("above", "over"), "below": ("below", "under", "beneath")}
ORDINALS = ("first", "second", "third", "fourth", "fifth")
BY_CATEGORY: dict[str, list[str]] = {c: [n for n in NAMES if CATEGORY[n] == c] for c in CATEGORY_ANSWER}
NAMEABLE_CATEGORIES = ("animal", "plant", "vehicle", "building", "tool", "musical instrument", "food", "drink", "sign")


class Question(NamedTuple):
    """One question and its answer; `kind` groups them for the evaluation."""

    text: str
    answer: str
    kind: str


def literal(text: str) -> str:
    return f"\x01{text.upper()}\x02"


def noun(thing: Thing) -> str:
    """'red circle', 'cat', 'number'."""
    return f"{thing.colour} {thing.name}" if thing.type == "shape" else thing.type if thing.is_text else thing.name


def full_noun(thing: Thing) -> str:
    """'a red circle', 'a cat', 'the number 42'."""
    return f"the {thing.type} {literal(thing.name)}" if thing.is_text else with_article(noun(thing))


def yes_no(truth: bool) -> str:
    return "yes" if truth else "no"


def unique(things: list[Thing], key: Callable[[Thing], object]) -> list[Thing]:
    """Things that no other thing shares the key with."""
    keys = [key(t) for t in things]
    return [t for t, k in zip(things, keys) if keys.count(k) == 1]


def in_reading_order(things: list[Thing]) -> list[Thing]:
    return sorted(things, key=lambda t: t.centre[0])


def join(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def everything(scene: Scene) -> str:
    return join([full_noun(t) for t in in_reading_order(scene.things)])


def describe(scene: Scene) -> str:
    text = everything(scene)
    if scene.background:
        text += f" on {with_article(scene.background)} background"
    return text[0].upper() + text[1:] + "."


def there(rng: random.Random, what: str, plural: bool = False) -> str:
    """'Is there a cat in the picture?' in some wording."""
    return pick(rng, phrases.THERE_MANY if plural else phrases.THERE, a=what)


def ask_what(scene: Scene, rng: random.Random) -> Iterator[Question]:
    single = len(scene.things) == 1
    for _ in range(2):
        yield Question(pick(rng, phrases.WHAT if single else phrases.WHAT_ALL), everything(scene), "what" if single else "what_all")
    yield Question(pick(rng, phrases.DESCRIBE), describe(scene), "describe")


def ask_background(scene: Scene, rng: random.Random) -> Iterator[Question]:
    if scene.background:
        yield Question(pick(rng, phrases.BACKGROUND), scene.background, "background")


def ask_pictogram(scene: Scene, rng: random.Random) -> Iterator[Question]:
    """Is it a ..., is there a ..., for pictograms."""
    pictograms = [t for t in scene.things if t.type == "pictogram"]
    shown = {t.name for t in pictograms}
    if not pictograms and rng.random() < 0.8:
        return
    for _ in range(2):
        truth = bool(pictograms) and rng.random() < 0.5
        pool = BY_CATEGORY[CATEGORY[rng.choice(pictograms).name]] if pictograms and rng.random() < 0.4 else NAMES
        name = rng.choice(pictograms).name if truth else rng.choice([n for n in pool if n not in shown])
        text = there(rng, name if is_plural(name) else with_article(name), is_plural(name))
        if len(scene.things) == 1 and rng.random() < 0.4:
            text = f"Are these {name}?" if is_plural(name) else pick(rng, phrases.IS_IT, a=with_article(name))
        yield Question(text, yes_no(truth), "yesno_pictogram")
    if len(pictograms) > 1:
        name = rng.choice(pictograms).name
        if not is_plural(name) and name != "sheep" and name[-1] not in "sxfhy" and " " not in name:
            yield Question(pick(rng, phrases.COUNT_OF, names=f"{name}s"), str(sum(t.name == name for t in pictograms)), "count_some")


def ask_category(scene: Scene, rng: random.Random) -> Iterator[Question]:
    pictograms = [t for t in scene.things if t.type == "pictogram"]
    if not pictograms:
        return
    shown = {CATEGORY[t.name] for t in pictograms}
    truth = rng.random() < 0.5
    category = rng.choice(sorted(shown)) if truth else rng.choice([c for c in CATEGORY_ANSWER if c not in shown])
    answer = CATEGORY_ANSWER[category]
    thing = pictograms[0]
    if scene.kind == "pictogram":
        yield Question(pick(rng, phrases.CATEGORY), CATEGORY_ANSWER[CATEGORY[thing.name]], "category")
        text = f"Are these {answer}?" if is_plural(thing.name) else pick(rng, phrases.IS_IT, a=answer)
        yield Question(text, yes_no(truth), "yesno_category")
        if rng.random() < 0.2:
            yield Question(pick(rng, phrases.EDIBLE), yes_no(CATEGORY[thing.name] == "food"), "yesno_category")
    elif category not in ("food", "clothing", "nature"):
        yield Question(there(rng, answer), yes_no(truth), "yesno_category")
    for category in shown & set(NAMEABLE_CATEGORIES):
        members = [t for t in pictograms if CATEGORY[t.name] == category]
        if len(members) == 1 and rng.random() < 0.5:
            text = rng.choice((f"What {category} is this?", f"Which {category} is it?", f"Which {category} do you see?", f"What {category} do you see?"))
            yield Question(text, full_noun(members[0]), "what_category")


def ask_shape_exists(scene: Scene, rng: random.Random) -> Iterator[Question]:
    """Is there a red star?  A false one is a near miss: one of the two words is right."""
    shapes = [t for t in scene.things if t.type == "shape"]
    if not shapes:
        return
    for _ in range(2):
        thing, truth, k = rng.choice(shapes), rng.random() < 0.5, rng.random()
        have = {(t.colour, t.name) for t in shapes}
        colour, name = thing.colour, thing.name
        while not truth and (colour, name) in have:
            colour = thing.colour if k < 0.4 else rng.choice(COLOUR_NAMES)
            name = thing.name if 0.4 <= k < 0.8 else rng.choice(SHAPES)
        yield Question(there(rng, with_article(f"{colour} {name}")), yes_no(truth), "yesno_shape")
    name = rng.choice(shapes).name if rng.random() < 0.5 else rng.choice(SHAPES)
    yield Question(there(rng, with_article(name)), yes_no(any(t.name == name for t in shapes)), "yesno_shape")


def ask_attributes(scene: Scene, rng: random.Random) -> Iterator[Question]:
    """The colour of a shape, the shape of a colour."""
    shapes = [t for t in scene.things if t.type == "shape"]
    for t in unique(shapes, lambda t: t.name)[:3]:
        yield Question(pick(rng, phrases.COLOUR_OF, name=t.name), t.colour or "", "colour")
    for t in unique([t for t in scene.things if t.colour], lambda t: t.colour)[:3]:
        if t.type == "shape":
            yield Question(pick(rng, phrases.SHAPE_OF, name=t.colour or ""), with_article(t.name), "shape")
    if len(shapes) == len(scene.things) == 1:
        yield Question(pick(rng, phrases.SHAPE_OF_IT), with_article(shapes[0].name), "shape")
        yield Question(pick(rng, phrases.COLOUR_OF_IT), shapes[0].colour or "", "colour")


def ask_count(scene: Scene, rng: random.Random) -> Iterator[Question]:
    things = scene.things
    if any(t.is_text for t in things):
        return
    all_shapes = all(t.type == "shape" for t in things)
    yield Question(pick(rng, phrases.COUNT + (phrases.COUNT_SHAPES if all_shapes else ())), str(len(things)), "count")
    if all_shapes:
        name = rng.choice(things).name if rng.random() < 0.85 else rng.choice(SHAPES)
        plural = name + ("es" if name.endswith("s") else "s")
        yield Question(pick(rng, phrases.COUNT_OF, names=plural), str(sum(t.name == name for t in things)), "count_some")
        colour = rng.choice(things).colour if rng.random() < 0.85 else rng.choice(COLOUR_NAMES)
        yield Question(pick(rng, phrases.COUNT_COLOUR, name=colour or ""), str(sum(t.colour == colour for t in things)), "count_some")
        for thing, words in zip(extremes(things), (("biggest", "largest"), ("smallest", "smallest"))):
            if thing and thing in unique(things, noun):
                yield Question(pick(rng, phrases.EXTREME, name=rng.choice(words)), full_noun(thing), "size")


def reference(scene: Scene, thing: Thing, rng: random.Random) -> str:
    """'red circle', or just 'circle' where that is clear."""
    if thing.type == "shape" and sum(t.name == thing.name for t in scene.things) == 1 and rng.random() < 0.4:
        return thing.name
    return noun(thing)


def ask_sides(scene: Scene, rng: random.Random) -> Iterator[Question]:
    """What is at an end of the picture, and what is next to a named thing on one side."""
    things = scene.things
    if len(things) < 2:
        return
    for axis, ends in ((0, ("left", "right")), (1, ("top", "bottom"))):
        line = sorted(things, key=lambda t: t.centre[axis])
        for end, thing, other in ((ends[0], line[0], line[1]), (ends[1], line[-1], line[-2])):
            if abs(thing.centre[axis] - other.centre[axis]) > 14 and rng.random() < 0.3:
                yield Question(pick(rng, phrases.AT_END, end=end), full_noun(thing), "sides")
    for thing in unique(things, noun):
        side = rng.choice(list(OPPOSITE))
        axis, sign = (0 if side in ("left of", "right of") else 1), (1 if side in ("right of", "below") else -1)
        offsets = [(sign * (t.centre[axis] - thing.centre[axis]), t) for t in things if t is not thing]
        beyond = [t for d, t in offsets if d > 14]
        if all(abs(d) > 14 for d, _t in offsets) and len(beyond) <= 1:
            if not beyond and rng.random() < 0.6:
                continue
            text = pick(rng, phrases.NEXT_TO, side=rng.choice(WORDINGS[side]), name=reference(scene, thing, rng))
            yield Question(text, full_noun(beyond[0]) if beyond else "nothing", "relation")


def ask_nth(scene: Scene, rng: random.Random) -> Iterator[Question]:
    """What is the second object from the left?"""
    line = in_reading_order(scene.things)
    gaps = [99.0, *(b.centre[0] - a.centre[0] for a, b in pairwise(line)), 99.0]
    clear = [i for i in range(len(line)) if gaps[i] > 8 and gaps[i + 1] > 8]
    if len(line) > 1 and clear:
        i = rng.choice(clear)
        yield Question(pick(rng, phrases.FROM_LEFT, nth=ORDINALS[i]), full_noun(line[i]), "nth")


def ask_relation(scene: Scene, rng: random.Random) -> Iterator[Question]:
    """Is the cat left of the dog?"""
    named = unique(scene.things, noun)
    for _ in range(2 if len(named) > 1 else 0):
        a, b = rng.sample(named, 2)
        axis = 0 if abs(a.centre[0] - b.centre[0]) > abs(a.centre[1] - b.centre[1]) else 1
        gap = b.centre[axis] - a.centre[axis]
        if abs(gap) > 20:
            side = ("left of", "above")[axis] if gap > 0 else ("right of", "below")[axis]
            truth = rng.random() < 0.5
            words = {"is": "Are" if is_plural(a.name) else "Is", "side": rng.choice(WORDINGS[side if truth else OPPOSITE[side]]),
                     "a": reference(scene, a, rng), "b": reference(scene, b, rng)}
            yield Question(pick(rng, phrases.IS_NEXT_TO, **words), yes_no(truth), "yesno_relation")


def ask_where(scene: Scene, rng: random.Random) -> Iterator[Question]:
    named = unique(scene.things, noun)
    for thing in rng.sample(named, min(2, len(named))):
        clear = all(abs(c - e) > 5 for c in thing.centre for e in EDGES)
        if clear and thing.radius < SIZE * 0.34:
            wordings = phrases.WHERE_MANY if is_plural(thing.name) else phrases.WHERE
            if len(scene.things) == 1 and rng.random() < 0.4:
                wordings = phrases.WHERE_IT
            yield Question(pick(rng, wordings, name=reference(scene, thing, rng)), PLACES[third(thing.centre[1])][third(thing.centre[0])], "where")


def ask_text(scene: Scene, rng: random.Random) -> Iterator[Question]:
    texts = [t for t in scene.things if t.is_text]
    for thing in texts:
        is_number = thing.type == "number"
        yield Question(pick(rng, phrases.READ), literal(thing.name), "read")
        yield Question(pick(rng, phrases.READ_NUMBER if is_number else phrases.READ_WORD), literal(thing.name), "read")
        yield Question(pick(rng, phrases.TEXT_COLOUR, kind=thing.type), thing.colour or "", "text_colour")
        yield Question(pick(rng, phrases.TEXT_KIND), f"a {thing.type}", "text_kind")
        if rng.random() < 0.5:
            yield Question(pick(rng, phrases.DIGITS if is_number else phrases.LETTERS), str(len(thing.name)), "length")
    if rng.random() < (0.5 if texts else 0.3):
        yield Question(pick(rng, phrases.ANY_TEXT), yes_no(bool(texts)), "yesno_text")


def ask_unanswerable(scene: Scene, rng: random.Random) -> Iterator[Question]:
    """About things that are not there, and about what no picture of this kind tells."""
    shapes = {t.name for t in scene.things if t.type == "shape"}
    shown = shapes | {t.name for t in scene.things if t.type == "pictogram"}
    if rng.random() < 0.4:
        name = rng.choice([s for s in SHAPES if s not in shown])
        yield Question(pick(rng, rng.choice((phrases.COLOUR_OF, phrases.COLOUR_OF, phrases.WHERE)), name=name), CANT, "cant")
    if rng.random() < 0.35:
        name = rng.choice([n for n in NAMES if n not in shown and not is_plural(n)])
        side = rng.choice(list(WORDINGS.values()))[0]
        yield Question(pick(rng, rng.choice((phrases.WHERE, phrases.WHERE, phrases.NEXT_TO)), name=name, side=side), CANT, "cant")
    if not any(t.is_text for t in scene.things) and rng.random() < 0.3:
        yield Question(pick(rng, phrases.READ + phrases.READ_NUMBER + phrases.READ_WORD), CANT, "cant")
    if rng.random() < 0.15:
        yield Question(pick(rng, phrases.UNKNOWABLE), CANT, "cant")


ASKERS = (ask_what, ask_background, ask_pictogram, ask_category, ask_shape_exists, ask_attributes, ask_count, ask_sides, ask_nth,
          ask_relation, ask_where, ask_text, ask_unanswerable)


def questions(scene: Scene, rng: random.Random) -> list[Question]:
    """Questions of every kind that the scene allows, in random order."""
    out = [q for ask in ASKERS for q in ask(scene, rng)]
    rng.shuffle(out)
    return out
