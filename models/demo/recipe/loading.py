"""Endless batches of pictures with their dense labels, rendered in a worker process."""
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from .drawing import Assets
from .labels import Labels, dense_labels
from .scenes import TOWER_MIX, Scene, render

Batch = dict[str, torch.Tensor]


def stack(pictures: list[np.ndarray], labels: list[Labels]) -> Batch:
    """pixels [n, 128, 128, 3] uint8 and every field of Labels, stacked."""
    batch = {"pixels": torch.from_numpy(np.stack(pictures))}
    for name in Labels.__slots__:
        batch[name] = torch.from_numpy(np.stack([getattr(x, name) for x in labels]))
    return batch


class Pictures(torch.utils.data.IterableDataset):
    """Batches for the tower: picture seeds count up from `start`."""

    def __init__(self, assets: Path, batch_size: int, start: int, mix: tuple[float, ...] = TOWER_MIX) -> None:
        self.assets, self.batch_size, self.start, self.mix = assets, batch_size, start, mix

    def __iter__(self) -> Iterator[Batch]:
        torch.set_num_threads(1)
        assets, seed = Assets(self.assets), self.start
        while True:
            rows = [render(assets, seed + i, mix=self.mix) for i in range(self.batch_size)]
            seed += self.batch_size
            yield stack([np.asarray(p) for p, _s in rows], [dense_labels(s) for _p, s in rows])


def prefetch(dataset: torch.utils.data.IterableDataset, ahead: int = 6) -> Iterator:
    """The dataset's batches, made ahead of time in one worker process."""
    return iter(torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=1, prefetch_factor=ahead))


def held_out_batch(assets: Assets, split: str, kind: str | None, start: int, n: int,
                   keep: Callable[[Scene], bool] = lambda _scene: True) -> tuple[Batch, list[Scene]]:
    """n pictures of an evaluation split that `keep` accepts, and their scenes."""
    pictures, scenes, seed = [], [], start
    while len(scenes) < n:
        picture, scene = render(assets, seed, split, kind)
        seed += 1
        if keep(scene):
            pictures.append(np.asarray(picture))
            scenes.append(scene)
    return stack(pictures, [dense_labels(s) for s in scenes]), scenes
