"""Stage 1: train the tower, its label heads and the projector on dense labels, without a text model."""
import json
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from .codebook import Codebook
from .drawing import Assets
from .labels import ATTRIBUTES, NUM_PATCHES
from .loading import Pictures, held_out_batch, prefetch
from .network import Heads, Projector, Tower
from .optimizer import Optimizers, schedule
from .scenes import NAMES
from .tower_loss import dense_loss

BATCH = 128
FIRST_NAME = next(iter(ATTRIBUTES.values())) - len(NAMES)


@torch.no_grad()
def top_names(tower: Tower, heads: Heads, pixels: torch.Tensor) -> torch.Tensor:
    """The likeliest pictogram of each picture [n], by the summed probabilities of its patches."""
    with torch.autocast("cpu", torch.bfloat16):
        features = tower(pixels)
        logits = heads(heads.ln(features.float()).view(-1, features.shape[-1]).to(torch.bfloat16))["class"]
    return F.softmax(logits, -1).view(len(pixels), NUM_PATCHES, -1)[..., FIRST_NAME:].sum(1).argmax(-1)


@torch.no_grad()
def evaluate(tower: Tower, heads: Heads, projector: Projector, book: Codebook, assets: Assets, n: int) -> dict[str, float]:
    """Accuracies of the label heads on held-out pictures, and of pictogram names in trained and untrained styles."""
    scores: dict[str, float] = {}
    batch, _scenes = held_out_batch(assets, "eval", None, 10**7, 256)
    with torch.autocast("cpu", torch.bfloat16):
        scores |= dense_loss(tower(batch["pixels"]), heads, projector, batch, book)[1]
    for split in ("eval", "unseen"):
        batch, scenes = held_out_batch(assets, split, "pictogram", 2 * 10**7, n)
        truth = torch.tensor([NAMES.index(s.things[0].name) for s in scenes])
        scores[f"names {split}"] = (top_names(tower, heads, batch["pixels"]) == truth).float().mean().item()
    return {k: round(v, 3) for k, v in scores.items()}


def train(assets: Path, out: Path, steps: int, total: int, start: Path | None = None, rate: float = 0.7, seed: int = 1) -> None:
    """Train up to `steps` batches of the `total` that the rate is planned for.

    Goes on from `out` if it exists, else from `start` if given; writes `out` and a log.
    """
    torch.manual_seed(seed)
    tower, heads, projector, book = Tower(), Heads(), Projector(), Codebook.of(out.parent)
    modules = {"tower": tower, "heads": heads, "projector": projector}
    # the projector's first layer is tiny and its second one large: see stage_projector.linear_start
    optimizers = Optimizers([(tower, 0.02 * rate, 1.5e-3 * rate), (heads, 0, 1.5e-3),
                             (projector.linear_1, 0, 2e-5), (projector.linear_2, 0, 1e-3)])
    step = 0
    if out.exists() or start:
        saved = torch.load(out if out.exists() else start)
        for name, module in modules.items():
            module.load_state_dict(saved[name])
        if out.exists():
            step = saved["step"]
            optimizers.load(saved["optimizers"])
    run, began = torch.compile(tower, dynamic=False), time.time()
    batches = prefetch(Pictures(assets, BATCH, 1_000_000 * seed + step * BATCH))

    def note(**line: object) -> None:
        print(json.dumps(line), flush=True)
        with open(f"{out}.log", "a") as log:
            print(json.dumps(line), file=log)

    def save() -> None:
        state = {name: m.state_dict() for name, m in modules.items()}
        torch.save(state | {"step": step, "optimizers": optimizers.state()}, f"{out}.tmp")
        os.replace(f"{out}.tmp", out)

    while step < steps:
        batch = next(batches)
        with torch.autocast("cpu", torch.bfloat16):
            losses, accuracy = dense_loss(run(batch["pixels"]), heads, projector, batch, book)
        sum(losses.values()).backward()
        optimizers.step(schedule(step, total))
        step += 1
        if step % 25 == 1:
            note(step=step, s=round(time.time() - began), loss={k: round(v.item(), 3) for k, v in losses.items()},
                 acc={k: round(v, 3) for k, v in accuracy.items()})
        if step % 100 == 0:
            save()
        if step % 250 == 0:
            note(step=step, eval=evaluate(tower, heads, projector, book, Assets(assets), 256))
    save()
    note(step=step, final=evaluate(tower, heads, projector, book, Assets(assets), 512))
