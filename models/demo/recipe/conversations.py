"""Token sequences for the text model: a picture (or two, or none) and many questions about it.

In 'fan' form every question sees the shared prefix and no other question, so each is a true first turn; in 'chat' form the
questions follow one another.  An attention mask made from `segments` keeps them apart.
"""
import random
from dataclasses import dataclass, field

import numpy as np

from . import phrases, small_talk
from .concepts import CATEGORY_ANSWER, with_article
from .labels import NUM_PATCHES
from .phrases import pick
from .questions import (
    Question,
    describe,
    everything,
    full_noun,
    noun,
    questions,
    unique,
    yes_no,
)
from .scenes import CATEGORY, Scene
from .tokenizer import ASSISTANT, END, IMAGE, PAD, SYSTEM, USER, Encoder

LENGTH = 208
# How often each kind of question is kept: answers that the model must look for get the room.
KEEP = {"describe": 0.4, "background": 0.6, "text_kind": 0.4, "text_colour": 0.5, "length": 0.4, "yesno_text": 0.4, "sides": 0.6,
        "count_some": 0.7, "yesno_category": 0.7, "two_describe": 0.4, "two_what": 0.7, "two_count": 0.6, "two_background": 0.4, "two_both": 0.7}


@dataclass(slots=True)
class Tokens:
    """One sequence: next-token targets (-1: none) with weights; segment 0 is seen by all, segment -1 is padding."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def put(self, ids: list[int], segment: int, position: int, learn: bool = False) -> int:
        """Append tokens; with `learn`, they are what the positions before them must predict.  Returns the next position."""
        for k, token in enumerate(ids):
            if learn:
                self.targets[-1], self.weights[-1] = token, len(ids) ** -0.5
            self.ids.append(token)
            self.positions.append(position + k)
            self.segments.append(segment)
            self.targets.append(-1)
            self.weights.append(0.0)
        return position + len(ids)

    def arrays(self) -> tuple[np.ndarray, ...]:
        """ids, positions, segments, targets, weights, each [208]."""
        pad = LENGTH - len(self.ids)
        columns = ((self.ids, PAD), (self.positions, 0), (self.segments, -1), (self.targets, -1))
        return *(np.array(v + [fill] * pad) for v, fill in columns), np.array(self.weights + [0.0] * pad, np.float32)


def prefix(encoder: Encoder, rng: random.Random, num_pictures: int) -> list[int]:
    """The start of a user's message with pictures, now and then after a system message."""
    ids = [SYSTEM, *encoder(pick(rng, small_talk.SYSTEMS)), END] if rng.random() < 0.12 else []
    return ids + [USER] + ([IMAGE] * NUM_PATCHES + encoder("\n")) * num_pictures


def add_questions(tokens: Tokens, encoder: Encoder, asked: list[Question], rng: random.Random, position: int, fan: bool) -> None:
    """Fill the sequence with questions and their answers."""
    for i, q in enumerate(asked):
        ask = [*encoder(phrases.restyle(q.text, rng)), END, ASSISTANT]
        if i and not fan:
            ask = [USER, *ask]
        answer = encoder.answer(q.answer)
        if len(tokens.ids) + len(ask) + len(answer) > LENGTH:
            continue
        segment = i + 1 if fan else 0
        end = tokens.put(answer, segment, tokens.put(ask, segment, position), learn=True)
        if not fan:
            position = end
        if len(tokens.ids) > LENGTH - 12:
            break


def chat(rng: random.Random) -> Question:
    """Something that needs no picture."""
    asked, answer = rng.choice(small_talk.SMALL_TALK)
    return Question(pick(rng, asked), answer, "small talk")


def about_one(encoder: Encoder, rng: random.Random, scene: Scene) -> Tokens:
    """A picture and as many questions as fit."""
    tokens = Tokens()
    position = tokens.put(prefix(encoder, rng, 1), 0, 0)
    asked = [q for _ in range(2) for q in questions(scene, rng) if rng.random() < KEEP.get(q.kind, 1.0)]
    if rng.random() < 0.15:
        asked.insert(rng.randrange(3), chat(rng))
    add_questions(tokens, encoder, asked, rng, position, fan=rng.random() < 0.7)
    return tokens


def two_picture_questions(scenes: tuple[Scene, Scene], rng: random.Random) -> list[Question]:
    """Which picture has the cat?  What is in the second picture?"""
    out = []
    nouns = [[noun(t) for t in s.things if not t.is_text] for s in scenes]
    for i, (order, scene) in enumerate(zip(("first", "second"), scenes)):
        only = [t for t in unique(scene.things, noun) if not t.is_text and noun(t) not in nouns[1 - i]]
        for t in only[:2]:
            out.append(Question(pick(rng, phrases.WHICH_PICTURE, name=noun(t), a=full_noun(t)), f"the {order} picture", "two_which"))
        categories = [{CATEGORY[t.name] for t in s.things if t.type == "pictogram"} for s in scenes]
        for category in sorted(categories[i] - categories[1 - i])[:1]:
            out.append(Question(pick(rng, phrases.WHICH_PICTURE_KIND, a=CATEGORY_ANSWER[category]), f"the {order} picture", "two_which"))
        number = rng.choice((str(i + 1), ("one", "two")[i]))
        out.append(Question(pick(rng, phrases.ONE_OF_TWO, nth=order, number=number), everything(scene), "two_what"))
        if not any(t.is_text for t in scene.things):
            out.append(Question(pick(rng, phrases.COUNT_IN_ONE, nth=order), str(len(scene.things)), "two_count"))
        if scene.background:
            out.append(Question(pick(rng, phrases.BACKGROUND_OF_ONE, nth=order), scene.background, "two_background"))
    if any(nouns):
        name = rng.choice(nouns[0] + nouns[1])
        out.append(Question(pick(rng, phrases.BOTH, a=with_article(name)), yes_no(name in nouns[0] and name in nouns[1]), "two_both"))
    out.append(Question(pick(rng, phrases.DESCRIBE_TWO), f"First: {describe(scenes[0])} Second: {describe(scenes[1])}", "two_describe"))
    rng.shuffle(out)
    return out


def about_two(encoder: Encoder, rng: random.Random, first: Scene, second: Scene) -> Tokens:
    """Two pictures in one message, or, one time in four, the second one sent in a later turn."""
    tokens = Tokens()
    if rng.random() < 0.75:
        position = tokens.put(prefix(encoder, rng, 2), 0, 0)
        asked = [q for _ in range(2) for q in two_picture_questions((first, second), rng) if rng.random() < KEEP.get(q.kind, 1.0)]
        add_questions(tokens, encoder, asked, rng, position, fan=True)
        return tokens
    q = next(q for q in questions(first, rng) if q.kind != "describe")
    position = tokens.put([*prefix(encoder, rng, 1), *encoder(q.text), END, ASSISTANT], 0, 0)
    position = tokens.put(encoder.answer(q.answer), 0, position, learn=True)
    position = tokens.put([USER, *[IMAGE] * NUM_PATCHES, *encoder("\n")], 0, position)
    add_questions(tokens, encoder, questions(second, rng), rng, position, fan=True)
    return tokens


def without_picture(encoder: Encoder, rng: random.Random, some_scene: Scene) -> Tokens:
    """Small talk, and questions about a picture that was not sent."""
    tokens = Tokens()
    asked = [chat(rng) for _ in range(9)]
    asked += [Question(q.text, small_talk.NO_PICTURE, "no picture") for q in questions(some_scene, rng)[:3]]
    rng.shuffle(asked)
    position = tokens.put([USER], 0, 0)
    add_questions(tokens, encoder, asked, rng, position, fan=rng.random() < 0.7)
    return tokens
