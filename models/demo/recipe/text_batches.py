"""Batches for the text model: pictures with labels, and token sequences about them."""
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from .conversations import about_one, about_two, without_picture
from .drawing import Assets
from .labels import dense_labels
from .loading import Batch, stack
from .scenes import render
from .tokenizer import Encoder

TEXT_MIX = (0.25, 0.17, 0.21, 0.25, 0.07, 0.05)
SINGLES, PAIRS = 9, 2  # sequences of a batch about one picture, and about two
NUM_PICTURES = SINGLES + 2 * PAIRS
SEQUENCE = ("ids", "positions", "segments", "targets", "weights")


class Conversations(torch.utils.data.IterableDataset):
    """Sequences about one picture, about two, and one about none; picture seeds count up from `start`."""

    def __init__(self, assets: Path, tokenizer: Path, start: int, mix: tuple[float, ...] = TEXT_MIX) -> None:
        self.assets, self.tokenizer, self.start, self.mix = assets, tokenizer, start, mix

    def __iter__(self) -> Iterator[Batch]:
        torch.set_num_threads(1)
        assets, encoder, seed = Assets(self.assets), Encoder(self.tokenizer), self.start
        rng = random.Random(self.start)
        while True:
            rows = [render(assets, seed + i, mix=self.mix) for i in range(NUM_PICTURES)]
            seed += NUM_PICTURES
            scenes = [s for _p, s in rows]
            sequences = [about_one(encoder, rng, s) for s in scenes[:SINGLES]]
            sequences += [about_two(encoder, rng, *scenes[i:i + 2]) for i in range(SINGLES, NUM_PICTURES, 2)]
            sequences.append(without_picture(encoder, rng, scenes[0]))
            batch = stack([np.asarray(p) for p, _s in rows], [dense_labels(s) for s in scenes])
            columns = zip(*(t.arrays() for t in sequences))
            yield batch | {name: torch.from_numpy(np.stack(c)) for name, c in zip(SEQUENCE, columns)}


def attention_mask(segments: torch.Tensor) -> torch.Tensor:
    """Additive mask [batch, length, length] from segments [batch, length]: causal, within a segment or onto segment 0."""
    length = segments.shape[1]
    same = (segments[:, :, None] == segments[:, None, :]) | (segments[:, None, :] == 0)
    real = (segments[:, None, :] >= 0) | torch.eye(length, dtype=torch.bool)
    return torch.where(same & torch.ones(length, length, dtype=torch.bool).tril() & real, 0.0, -1e9)
