"""The text model's own small vocabulary: a byte-level BPE of 2,048 tokens, digits one by one."""
import random
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from . import phrases, small_talk
from .concepts import CATEGORY_ANSWER, CHARS, COLOUR_NAMES, SHAPES, pictograms
from .drawing import Assets
from .questions import questions
from .scenes import render

VOCAB_SIZE = 2048
SPECIAL = ["<pad>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<image>"]
PAD, END, SYSTEM, USER, ASSISTANT, IMAGE = range(len(SPECIAL))


def corpus(assets: Assets) -> list[str]:
    """Questions and answers without their literal texts, and every wording by itself."""
    rng = random.Random(0)
    names = [*pictograms()[1], *SHAPES, *COLOUR_NAMES]
    lines = [phrases.pick(rng, group) for group in (phrases.UNKNOWABLE, small_talk.SYSTEMS) for _ in range(150)]
    for asked, answer in small_talk.SMALL_TALK:
        lines += [answer] * 20 + [phrases.pick(rng, asked) for _ in range(60)]
    lines += [small_talk.NO_PICTURE, "the first picture", "the second picture", "Do both pictures show the first or the second image?",
              "First: A cat. Second: A dog.", "Describe the pictures.", "Which picture has it?"] * 60
    lines += [f"{n} a {n} the {n} {n}" for n in names] * 12 + [f"a {c} {a}" for c, a in CATEGORY_ANSWER.items()] * 12
    for seed in range(5000):
        scene = render(assets, 5 * 10**7 + seed)[1]
        for q in questions(scene, rng):
            answer = q.answer.split("\x01")[0] + q.answer.split("\x02")[-1] if "\x01" in q.answer else q.answer
            lines += [phrases.restyle(q.text, rng), answer]
    return lines


def train_tokenizer(assets: Assets, out: Path) -> None:
    """Learn the vocabulary and write tokenizer.json."""
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                               pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    t.decoder = decoders.ByteLevel()
    special = [AddedToken(s, special=True, normalized=False) for s in SPECIAL]
    t.train_from_iterator(corpus(assets), trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    t.save(str(out))


class Encoder:
    """Turns wordings into token ids, with a cache."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(path))
        self.cache: dict[str, list[int]] = {}
        self.chars = {c: self.tokenizer.token_to_id(c) for c in CHARS}

    def __call__(self, text: str) -> list[int]:
        if text not in self.cache:
            if len(self.cache) > 100_000:
                self.cache.clear()
            self.cache[text] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return self.cache[text]

    def answer(self, text: str) -> list[int]:
        """An answer's tokens and the end token; a literal text becomes one token a character."""
        ids: list[int] = []
        for i, part in enumerate(text.replace("\x02", "\x01").split("\x01")):
            ids += [self.chars[c] for c in part] if i % 2 else self(part) if part else []
        return [*ids, END]
