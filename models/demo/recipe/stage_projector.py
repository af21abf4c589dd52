"""Stage 2: start the projector from the tower's label heads, and choose the class codes so that nothing is lost on the way.

The heads tell 232 classes apart linearly in 256 dimensions; the class codes have 154.  The codes are therefore turned so that
they span the directions that the heads use most (a singular value decomposition of the heads, weighted by how the features
vary).  The projector then begins as a nearly linear map, GELU working near zero, and is tuned for a few seconds.
"""
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from .codebook import CODE_NORM, FRAME_FILE, HIDDEN, Codebook
from .labels import ATTRIBUTES, CLASSES
from .loading import Pictures
from .network import DIM, Heads, Projector, Tower
from .tower_loss import writing_loss

MIX = (0.15, 0.4, 0.2, 0.15, 0.05, 0.05)
LOGITS_PER_CODE = 10.0  # a logit difference of ten becomes a whole code vector
SMALL = 0.012  # scale of the first layer: its GELU stays where it is almost linear


@dataclass(slots=True)
class Sample:
    """Chosen patches: features [n, 256] and their labels, as in labels.Labels."""

    features: torch.Tensor
    attributes: torch.Tensor
    chars: torch.Tensor
    order: torch.Tensor
    share: torch.Tensor


@torch.no_grad()
def collect(tower: Tower, assets: Path, num_batches: int, start: int) -> Sample:
    """Patches of things, and one in eight of the background, as the tower sees them."""
    columns: list[list[torch.Tensor]] = [[] for _ in range(5)]
    batches = iter(Pictures(assets, 128, start, MIX))
    for _ in range(num_batches):
        batch = next(batches)
        with torch.autocast("cpu", torch.bfloat16):
            features = tower(batch["pixels"]).reshape(-1, DIM).float()
        attributes = batch["attributes"].reshape(-1, len(ATTRIBUTES)).long()
        chosen = (attributes[:, 0] > 0) | (torch.rand(len(attributes)) < 0.125)
        pairs = (batch[k].reshape(-1, 2) for k in ("chars", "order", "share"))
        for column, values in zip(columns, (features, attributes, *pairs), strict=True):
            column.append(values[chosen])
    features, attributes, chars, order, share = (torch.cat(c) for c in columns)
    return Sample(features, attributes, chars.long(), order.long(), share.float())


def class_weights(heads: Heads) -> tuple[torch.Tensor, torch.Tensor]:
    """The class head on centred, unit-variance features: weights [232, 256] and biases [232], without their common part."""
    head = heads.patch.weight[:len(CLASSES)].detach()
    weight = head * heads.ln.weight.detach()
    bias = heads.patch.bias[:len(CLASSES)].detach() + head @ heads.ln.bias.detach()
    weight = weight - weight.mean(1, keepdim=True)
    return weight - weight.mean(0), bias - bias.mean()


def class_frame(weight: torch.Tensor, sample: Sample, dim: int) -> torch.Tensor:
    """Unit rows [232, dim] that keep what the class head tells apart."""
    x = sample.features[sample.attributes[:, 0] > 0]
    x = F.layer_norm(x, (DIM,))
    x = x - x.mean(0)
    values, vectors = torch.linalg.eigh(x.t() @ x / len(x))
    left = torch.linalg.svd(weight @ (vectors * values.clamp(min=1e-6).sqrt()), full_matrices=False)[0]
    return F.normalize(left[:, :dim], dim=1)


def linear_start(projector: Projector, heads: Heads, sample: Sample, book: Codebook) -> None:
    """Write the heads' class logits as amounts of class codes, and the small groups by least squares."""
    x, axes = sample.features, book.axes["class"]
    mean, deviation = x.mean(0), (x - x.mean(1, keepdim=True)).std(1).mean()
    ones = torch.cat([x, torch.ones(len(x), 1)], 1)
    ideal = book.patches(sample.attributes, sample.chars, sample.order, sample.share)
    small = torch.linalg.solve(ones.t() @ ones + 10 * torch.eye(DIM + 1), ones.t() @ ideal)  # [257, 256]
    weight, bias = class_weights(heads)
    logits = torch.cat([weight / deviation, bias[:, None]], 1) * CODE_NORM**2 / LOGITS_PER_CODE
    codes = book.codes[:len(CLASSES)] @ axes.t()
    classes = torch.linalg.lstsq(codes, logits).solution.t() @ axes  # [257, 256]
    whole = small @ (torch.eye(HIDDEN) - axes.t() @ axes) + classes
    with torch.no_grad():
        projector.linear_1.weight.copy_(SMALL * torch.eye(DIM))
        projector.linear_1.bias.copy_(-SMALL * mean)
        projector.linear_2.weight.copy_(2 * whole[:DIM].t() / SMALL)
        projector.linear_2.bias.copy_(whole[DIM] + mean @ whole[:DIM])


def tune(projector: Projector, sample: Sample, book: Codebook, steps: int) -> None:
    """A few hundred steps on the collected patches."""
    rates = (1e-4, 4e-3)
    layers = (projector.linear_1, projector.linear_2)
    optimizer = torch.optim.AdamW([{"params": list(m.parameters()), "lr": r} for m, r in zip(layers, rates, strict=True)],
                                  betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(steps):
        at = torch.randint(0, len(sample.features), (2048,))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * min(1, (step + 1) / 20) * max(0.02, 1 - step / steps)
        with torch.autocast("cpu", torch.bfloat16):
            written = projector(sample.features[at]).float()
        labels = (v[at] for v in (sample.attributes, sample.chars, sample.order, sample.share))
        sum(writing_loss(written, *labels, book).values()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def fit(assets: Path, checkpoint: Path, num_batches: int = 36, steps: int = 400, seed: int = 88_000_000) -> None:
    """Replace the projector in the tower's checkpoint, and leave the class frame beside it; done once."""
    if (checkpoint.parent / FRAME_FILE).exists():
        return
    torch.manual_seed(seed)
    saved = torch.load(checkpoint)
    tower, heads, projector = Tower(), Heads(), Projector()
    tower.load_state_dict(saved["tower"])
    heads.load_state_dict(saved["heads"])
    sample = collect(tower, assets, num_batches, seed)
    dim = HIDDEN - Codebook().num_axes
    torch.save(class_frame(class_weights(heads)[0], sample, dim), checkpoint.parent / FRAME_FILE)
    book = Codebook.of(checkpoint.parent)
    linear_start(projector, heads, sample, book)
    tune(projector, sample, book, steps)
    saved["projector"] = projector.state_dict()
    for optimizer in saved["optimizers"][-2:]:
        optimizer["state"] = {}  # the projector's own: its moments belong to the old weights
    torch.save(saved, checkpoint)
