"""Stage 3: teach the text model to look, at real pictures as the tower sees them; the tower is not trained here."""
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from .codebook import Codebook
from .conversations import Tokens, add_questions, prefix
from .drawing import Assets
from .labels import dense_labels
from .loading import Batch, prefetch, stack
from .network import Projector, Text, Tower
from .optimizer import Optimizers, schedule
from .questions import questions
from .scenes import render
from .text_batches import NUM_PICTURES, SEQUENCE, Conversations
from .text_loss import answer_loss
from .tokenizer import VOCAB_SIZE, Encoder
from .wiring import clear_reserved, initialise

Look = Callable[[Batch], torch.Tensor]


@torch.no_grad()
def exact_by_kind(text: Text, look: Look, assets: Assets, encoder: Encoder, split: str, n: int, start: int = 3 * 10**7) -> dict[str, str]:
    """Share of answers with every token right, by kind of question; the same as greedy decoding would give."""
    hits, totals, rng = Counter(), Counter(), random.Random(0)
    for first in range(start, start + n, 16):
        rows = [render(assets, first + i, split) for i in range(16)]
        sequences, kinds = [], []
        for _picture, scene in rows:
            tokens, asked = Tokens(), questions(scene, rng)
            add_questions(tokens, encoder, asked, rng, tokens.put(prefix(encoder, rng, 1), 0, 0), fan=True)
            sequences.append(tokens.arrays())
            kinds.append([q.kind for q in asked])
        batch = stack([np.asarray(p) for p, _s in rows], [dense_labels(s) for _p, s in rows])
        batch |= {name: torch.from_numpy(np.stack(c)) for name, c in zip(SEQUENCE, zip(*sequences))}
        with torch.autocast("cpu", torch.bfloat16):
            _loss, right, at = answer_loss(text, batch, look(batch))
        segments = batch["segments"].view(-1)[at]
        for row in range(16):
            mine = at // batch["ids"].shape[1] == row
            for segment in segments[mine].unique().tolist():
                kind = kinds[row][segment - 1]
                totals[kind] += 1
                hits[kind] += bool(right[mine][segments[mine] == segment].all())
    return {k: f"{100 * hits[k] / totals[k]:.0f}% of {totals[k]}" for k in sorted(totals)}


class Learner:
    """The model's parts with the text model's optimizers, and the checkpoint they live in."""

    def __init__(self, out: Path, tokenizer: Path, rate: float) -> None:
        self.out, self.encoder, self.book = out, Encoder(tokenizer), Codebook.of(out.parent)
        self.tower, self.projector, self.text = Tower(), Projector(), Text(VOCAB_SIZE)
        initialise(self.text, self.encoder, self.book)
        self.parts = {"tower": self.tower, "projector": self.projector, "text": self.text}
        self.step, self.followed = 0, 0.0
        self.optimizers = Optimizers([(self.text, 0.01 * rate, 2e-3 * rate)])

    def restore(self) -> None:
        """Go on from `out` if it exists."""
        if self.out.exists():
            saved = torch.load(self.out)
            self.step = saved["step"]
            self.optimizers.load(saved["optimizers"])
            for name, part in self.parts.items():
                part.load_state_dict(saved[name])

    def save(self) -> None:
        state = {name: p.state_dict() for name, p in self.parts.items()}
        torch.save(state | {"step": self.step, "optimizers": self.optimizers.state()}, f"{self.out}.tmp")
        os.replace(f"{self.out}.tmp", self.out)

    def follow(self, tower: Path) -> None:
        """Take over the tower's newest checkpoint, if there is a newer one than before: it may still be in training."""
        changed = tower.stat().st_mtime
        if changed > self.followed:
            self.followed, saved = changed, torch.load(tower)
            self.tower.load_state_dict(saved["tower"])
            self.projector.load_state_dict(clear_reserved(saved["projector"], self.book))

    @torch.no_grad()
    def look(self, batch: Batch) -> torch.Tensor:
        """Patches [pictures, 64, 256] as the text model gets them."""
        return self.projector(self.tower(batch["pixels"]))

    def learn(self, batch: Batch) -> tuple[float, float]:
        """Gradients of one batch; returns the loss and the share of right answer tokens."""
        with torch.autocast("cpu", torch.bfloat16):
            loss, right, _at = answer_loss(self.text, batch, self.look(batch))
        loss.backward()
        return loss.item(), right.float().mean().item()


def train(assets: Path, tokenizer: Path, out: Path, steps: int, tower: Path, rate: float = 1.0, seed: int = 2) -> None:
    """Train the text model for `steps` batches on what `tower` sees; goes on from `out` if it exists."""
    torch.manual_seed(seed)
    learner = Learner(out, tokenizer, rate)
    learner.restore()
    learner.tower.compile(dynamic=False)
    learner.text.compile(dynamic=False)
    eval_assets, began, mean = Assets(assets), time.time(), 0.0
    batches = prefetch(Conversations(assets, tokenizer, 10**8 * seed + learner.step * NUM_PICTURES))

    def note(**line: object) -> None:
        print(json.dumps(line), flush=True)
        with open(f"{out}.log", "a") as log:
            print(json.dumps(line), file=log)

    while learner.step < steps:
        if learner.step % 20 == 0:
            learner.follow(tower)
        loss, right = learner.learn(next(batches))
        learner.optimizers.step(schedule(learner.step, steps))
        learner.step += 1
        mean = 0.95 * (mean or loss) + 0.05 * loss
        if learner.step % 50 == 1:
            note(step=learner.step, s=round(time.time() - began), loss=round(mean, 3), right=round(right, 3))
        if learner.step % 100 == 0:
            learner.save()
        if learner.step % 1000 == 0:
            for split in ("eval", "unseen"):
                note(step=learner.step, split=split, exact=exact_by_kind(learner.text, learner.look, eval_assets, learner.encoder, split, 256))
    learner.save()
