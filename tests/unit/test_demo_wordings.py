"""The wordings of the demo model's questions: each can be said, and what the evaluation asks is never trained."""

from __future__ import annotations

import importlib.util
import random
import re
import string
from pathlib import Path
from types import ModuleType

import pytest

PHRASES = Path(__file__).parents[2] / "models/demo/recipe/phrases.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_phrases", PHRASES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


phrases = load()
COLLECTIONS = {
    name: value
    for name, value in vars(phrases).items()
    if isinstance(value, tuple) and value and all(isinstance(pattern, str) for pattern in value)
}


@pytest.mark.parametrize("name", COLLECTIONS)
def test_every_pattern_becomes_a_plain_sentence(name: str) -> None:
    rng = random.Random(name)
    for pattern in COLLECTIONS[name]:
        fields = {field for _, field, _, _ in string.Formatter().parse(pattern) if field}
        for _ in range(20):
            text = phrases.pick(rng, (pattern,), **dict.fromkeys(fields, "cat"))
            assert not re.search(r"[()|<>{}\\]", text), pattern
            assert "  " not in text, pattern
            assert text == text.strip(), pattern
            assert pattern.startswith("{") or text[0] == text[0].upper(), pattern


def test_a_wording_of_the_evaluation_is_never_drawn() -> None:
    held_out = [text for texts in phrases.HELD_OUT.values() for text in texts]
    rng = random.Random(0)
    for text in held_out:
        drawn = {phrases.pick(rng, (text.upper(), text.rstrip("?."), "What else?")) for _ in range(50)}
        assert drawn == {"What else?"}


def test_enough_wordings_are_trained_for_each_that_is_held_out() -> None:
    rng = random.Random(1)
    for kind, patterns in (("what", phrases.WHAT), ("describe", phrases.DESCRIBE), ("count", phrases.COUNT)):
        drawn = {phrases.plain(phrases.pick(rng, patterns)) for _ in range(5_000)}
        assert not drawn & phrases.NEVER_TRAINED
        assert len(drawn) > 20 * len(phrases.HELD_OUT[kind])
