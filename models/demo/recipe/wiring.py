"""How the text model starts: it can already look things up in a picture, roughly, before its first step.

All of this is a choice of initial values; training is free to change it.
- A word that names a label starts from the label's code, as input and as output.
- Attention copies what it sees: the values and outputs of the four heads are four quarters of the codebook's axes.
- Every head looks at the first token, which carries nothing, unless it finds something better.
- In the look-up layers, queries and keys compare codes: "star" looks at patches that are stars and copies what else they
  are; "red" looks at red patches and copies their class.
- In the gathering layers, words look at all patches that show a thing.
"""
import torch

from .codebook import CODE_NORM, HIDDEN, Codebook, word_codes
from .network import HEAD_DIM, TEXT_HEADS, Text
from .tokenizer import SYSTEM, USER, Encoder

LOOK_UP_LAYERS, GATHER_LAYERS = (0, 2), (1, 3)
COPY_GAIN, MATCH_GAIN, FINAL_SCALE = 0.5, 1.0, 0.06
# Rotary positions turn the first axes of a head fast; only the slow ones can compare words with patches far away.
SLOW = [*range(12, 32), *range(44, 64)]
# What each head compares in the look-up layers.
MATCHED = (("class", "chars"), ("class", "chars"), ("colour", "category"), ("colour", "category"))


def word_axis(book: Codebook) -> torch.Tensor:
    """The direction [256] that every word carries and no patch does."""
    return book.axes["size"][0]


def sink_axis(book: Codebook) -> torch.Tensor:
    """The direction [256] that only the first token carries."""
    return book.axes["size"][1]


def clear_reserved(projector_state: dict[str, torch.Tensor], book: Codebook) -> dict[str, torch.Tensor]:
    """A projector that never writes the two reserved directions."""
    reserved = torch.stack([word_axis(book), sink_axis(book)])
    keep = torch.eye(HIDDEN) - reserved.t() @ reserved
    return projector_state | {"linear_2.weight": keep @ projector_state["linear_2.weight"], "linear_2.bias": keep @ projector_state["linear_2.bias"]}


def initialise(text: Text, encoder: Encoder, book: Codebook, seed: int = 3) -> None:
    """Set all that is special about the text model's initial values."""
    generator = torch.Generator().manual_seed(seed)
    width = TEXT_HEADS * HEAD_DIM
    reserved = torch.stack([word_axis(book), sink_axis(book)])
    keep = torch.eye(HIDDEN) - reserved.t() @ reserved
    with torch.no_grad():
        start_words(text, encoder, book, generator)
        text.norm.fill_(FINAL_SCALE)
        for i, layer in enumerate(text.layers):
            layer.qkv.weight[:2 * width].mul_(0.3)
            layer.qkv.weight[2 * width:].copy_(COPY_GAIN**0.5 * book.basis @ keep)
            layer.out.weight.copy_(COPY_GAIN**0.5 * book.basis.t())
            for head in range(TEXT_HEADS):
                queries, keys = (layer.qkv.weight[(part * TEXT_HEADS + head) * HEAD_DIM:][:HEAD_DIM] for part in (0, 1))
                if i in LOOK_UP_LAYERS:
                    start_look_up(queries, keys, head, book, generator)
                start_defaults(queries, keys, book, gather=i in GATHER_LAYERS)


def start_words(text: Text, encoder: Encoder, book: Codebook, generator: torch.Generator) -> None:
    """Every word that names a label starts from that label's code, as input and as output."""
    words = word_codes(book)
    rows = torch.randn(text.embed.weight.shape, generator=generator) * (CODE_NORM / HIDDEN**0.5)
    for token in range(rows.shape[0]):
        word = encoder.tokenizer.decode([token])
        code = words.get(word) if len(word) == 1 else words.get(word.strip().lower())
        if code is not None:
            rows[token] = 0.3 * rows[token] + code
    text.lm_head.weight.copy_(rows)
    rows += 3.0 * word_axis(book)
    for token in (USER, SYSTEM):
        rows[token] = 8.0 * sink_axis(book) + 3.0 * word_axis(book)
    text.embed.weight.copy_(rows)


def start_look_up(queries: torch.Tensor, keys: torch.Tensor, head: int, book: Codebook, generator: torch.Generator) -> None:
    """Let one head attend to positions that carry the same codes; queries, keys [64, 256]."""
    axes = torch.cat([book.axes[g] for g in MATCHED[head]])
    # a random projection keeps inner products well enough: forty slow axes compare up to 190
    compare = torch.randn(len(SLOW), len(axes), generator=generator) / len(SLOW) ** 0.5 @ axes
    queries[SLOW] = keys[SLOW] = MATCH_GAIN * compare


def start_defaults(queries: torch.Tensor, keys: torch.Tensor, book: Codebook, gather: bool) -> None:
    """Look at the first token, or, when gathering, have words look at all patches of things; queries, keys [64, 256].

    Every word carries the word axis, every patch some count; a patch of a thing carries a column and a row.
    """
    anyone = word_axis(book) + book.axes["count"].sum(0)
    queries[31], keys[31] = 0.55 * anyone, 0.55 * sink_axis(book)
    if gather:
        queries[30] = 0.8 * word_axis(book)
        keys[30] = 0.8 * (book.axes["column"].sum(0) + book.axes["row"].sum(0))
