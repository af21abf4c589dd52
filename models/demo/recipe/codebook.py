"""The language between tower and text model: a patch is written as a sum of fixed code vectors, one for each of its labels.

Words of the text model start from the same vectors (see `word_codes`), so "star" in a question already points at patches
that show a star, and reading "red" from a patch is already the token "red".
"""
from pathlib import Path

import torch

from .concepts import CATEGORIES, CHARS, COLOUR_NAMES, SHAPES
from .labels import ATTRIBUTES, CLASSES
from .words import MAX_LETTERS

HIDDEN = 256
CODE_NORM = 4.0
FRAME_FILE = "class_frame.pt"
GROUPS = {**ATTRIBUTES, "chars": len(CHARS), "order": MAX_LETTERS}


class Codebook:
    """codes [num_codes, 256] float32: every group of labels has its own orthogonal subspace, and within it, but for the
    classes, its own axis for each value.  `start[group]` is the row of the group's value 0.

    basis [256, 256]: orthonormal rows; the first `num_axes` are the axes of the small groups, the rest span the classes.
    """

    def __init__(self, frame: torch.Tensor | None = None, seed: int = 7) -> None:
        """`frame` [num_classes, 154]: unit rows that place the classes in their subspace; random ones if not given."""
        generator = torch.Generator().manual_seed(seed)
        basis = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=generator))[0]
        self.axes: dict[str, torch.Tensor] = {}  # group -> its axes [size, 256]
        self.start: dict[str, int] = {}
        rows, used = [], 0
        for group, size in GROUPS.items():
            self.start[group] = sum(len(r) for r in rows)
            if group == "class":
                rows.append(torch.zeros(size, HIDDEN))
                continue
            self.axes[group] = basis[used:used + size]
            rows.append(self.axes[group])
            used += size
        self.basis, self.num_axes = basis, used
        self.axes["class"] = basis[used:]
        frame = tight_frame(len(CLASSES), HIDDEN - used, generator) if frame is None else frame
        rows[0] = frame @ basis[used:]
        self.codes = torch.cat(rows) * CODE_NORM

    @classmethod
    def of(cls, folder: Path) -> "Codebook":
        """The codebook of a work folder: with the class frame that stage_projector.py left there, if it did."""
        file = folder / FRAME_FILE
        return cls(torch.load(file) if file.exists() else None)

    def code(self, group: str, value: int) -> torch.Tensor:
        """One code vector [256]."""
        return self.codes[self.start[group] + value]

    def patches(self, attributes: torch.Tensor, chars: torch.Tensor, order: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """The ideal patch vectors [n, 256] of labels: attributes [n, 12], chars, order, share [n, 2]."""
        start = torch.tensor([self.start[g] for g in ATTRIBUTES])
        table = torch.cat([self.codes, torch.zeros(1, HIDDEN)])  # the last row answers for "no value"
        none = len(self.codes)
        at = torch.where(attributes >= 0, attributes.long() + start, none)
        out = torch.nn.functional.embedding_bag(at, table, mode="sum")
        for group, values in (("chars", chars), ("order", order)):
            at = torch.where(values >= 0, values.long() + self.start[group], none)
            out = out + (table[at] * share.float()[..., None]).sum(1)
        return out


def tight_frame(n: int, dim: int, generator: torch.Generator) -> torch.Tensor:
    """n unit vectors [n, dim] that lie about as far from each other as they can."""
    x = torch.randn(n, dim, generator=generator)
    for _ in range(50):
        u, _s, v = torch.linalg.svd(x, full_matrices=False)
        x = torch.nn.functional.normalize(u @ v, dim=1)
    return x


def word_codes(book: Codebook) -> dict[str, torch.Tensor]:
    """Lower-case word -> the sum of the codes it stands for; a single capital or digit stands for its character."""
    words: dict[str, torch.Tensor] = {}

    def add(word: str, group: str, value: int) -> None:
        words[word.lower()] = words.get(word.lower(), torch.zeros(HIDDEN)) + book.code(group, value)

    for i, name in enumerate(CLASSES):
        first = name.split()[0]
        add(first, "class", i)
        if name in SHAPES:
            add("crosses" if name == "cross" else name + "s", "class", i)
    for i, name in enumerate(COLOUR_NAMES):
        add(name, "colour", i)
    for i, name in enumerate(CATEGORIES):
        add(name.split()[0], "category", i)
    for group, values in (("column", ("left", "center", "right")), ("row", ("top", "middle", "bottom")),
                          ("text_kind", ("number", "word")), ("size", ("biggest", "smallest"))):
        for i, word in enumerate(values):
            add(word, group, i)
    for i, digit in enumerate("12345"):
        add(digit, "count", i)
    add("largest", "size", 0)
    for i, char in enumerate(CHARS):
        words[char] = words.get(char, torch.zeros(HIDDEN)) + book.code("chars", i)
    return words
