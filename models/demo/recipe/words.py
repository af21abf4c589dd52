"""The texts to read: numbers, dictionary words, words of signs and random letters, one in ten held out of training."""
import random
import zlib
from pathlib import Path

MAX_LETTERS = 5
SIGNS = ["STOP", "EXIT", "OPEN", "SALE", "TAXI", "BUS", "HELLO", "PUSH", "PULL", "HOTEL", "CAFE", "BAR", "FREE", "NEW", "HOME", "LOVE", "YES", "NO", "OK", "GO", "NEWS", "PIZZA", "MENU", "BOOK", "PARK", "ZOO", "SHOP", "BANK", "POST"]


def held_out(text: str) -> bool:
    """Whether a text is kept for evaluation."""
    return zlib.crc32(text.encode()) % 10 == 0


def split_words(path: Path) -> tuple[list[str], list[str]]:
    """The word list's short lower-case words: those trained on, those held out."""
    words = sorted({w for w in path.read_text().split()
                    if w.isalpha() and w.isascii() and w.islower() and 2 <= len(w) <= MAX_LETTERS})
    return [w for w in words if not held_out(w)], [w for w in words if held_out(w)]


def random_number(rng: random.Random, train: bool) -> str:
    """A number of one to five digits; from three digits on, training and evaluation never share one."""
    n = rng.choice((1, 2, 2, 3, 3, 4, 4, 5, 5))
    while True:
        text = str(rng.randrange(10 ** (n - 1) if n > 1 else 0, 10**n))
        if n < 3 or held_out(text) != train:
            return text


def random_word(rng: random.Random, words: list[str], held_out_words: list[str], train: bool) -> str:
    """A word of two to five letters in capitals, lower case or capitalised."""
    k = rng.random()
    if not train:
        word = rng.choice(held_out_words)
    elif k < 0.5:
        word = rng.choice(words)
    elif k < 0.58:
        word = rng.choice(SIGNS).lower()
    else:
        while True:
            word = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, MAX_LETTERS)))
            if not held_out(word):
                break
    k = rng.random()
    return word.upper() if k < 0.55 else word.capitalize() if k < 0.75 else word
