"""The dense loss: tower features must tell each patch's labels, and the projector must write them in the codebook."""
import torch
import torch.nn.functional as F

from .codebook import CODE_NORM, GROUPS, Codebook
from .labels import ATTRIBUTE_ID, ATTRIBUTES, CLASSES, NUM_PATCHES
from .loading import Batch
from .network import DIM, Heads, Projector

WEIGHTS = {"class": 0.8, "category": 0.5, "colour": 0.8, "column": 0.3, "row": 0.3, "rank_x": 0.4, "rank_y": 0.4,
           "same_name": 0.3, "same_colour": 0.3, "text_kind": 0.1, "size": 0.3, "count": 0.4}
SHARPNESS = 8.0


def masked_cross_entropy(logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor, smooth: float = 0.0) -> torch.Tensor:
    """Weighted mean over targets >= 0; logits [n, k], target and weight [n]."""
    weight = weight * (target >= 0)
    loss = F.cross_entropy(logits, target.clamp(min=0), reduction="none", label_smoothing=smooth)
    return (loss * weight).sum() / weight.sum().clamp(min=1.0)


def two_target_cross_entropy(logits: torch.Tensor, target: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """The same for patches that two characters share; logits [n, k], target and share [n, 2]."""
    at = target[:, 0] >= 0
    both = logits[at].log_softmax(-1).gather(1, target[at].clamp(min=0))
    return -(both * share[at]).sum() / share[at].sum().clamp(min=1.0)


def picture_loss(heads: Heads, pooled: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Which classes the whole picture shows; pooled [batch, 256], classes [batch, 64]."""
    shown = torch.zeros(len(classes), len(CLASSES)).scatter_(1, classes, 1.0)
    shown[:, 0] = 0
    shown = shown / shown.sum(1, keepdim=True)
    return -(shown * F.log_softmax(heads.picture(pooled).float(), 1)).sum(1).mean()


def dense_loss(features: torch.Tensor, heads: Heads, projector: Projector, batch: Batch,
               book: Codebook) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Losses and accuracies on all patches of things and one in eight of the background; features [batch, 64, 256]."""
    classes = batch["attributes"][..., 0].long()
    chosen = ((classes > 0) | (torch.rand(classes.shape) < 0.125)).view(-1).nonzero()[:, 0]
    picked = {k: v.reshape(-1, *v.shape[2:])[chosen] for k, v in batch.items() if k != "pixels"}
    normed = heads.ln(features.float())
    logits = heads(normed.view(-1, DIM)[chosen].to(torch.bfloat16))
    attributes, chars, order, share = (picked[k].long() if k != "share" else picked[k].float()
                                       for k in ("attributes", "chars", "order", "share"))
    thing = (attributes[:, 0] > 0).float()
    losses, accuracy = {}, {}
    for name in ATTRIBUTES:
        target = attributes[:, ATTRIBUTE_ID[name]]
        weight = 0.5 + 0.5 * thing
        losses[name] = WEIGHTS[name] * masked_cross_entropy(logits[name], target, weight, 0.05 if name == "class" else 0.0)
        at = (target >= 0) & (thing > 0)
        accuracy[name] = (logits[name].argmax(1) == target)[at].float().mean().item()
    for name, target, weight in (("chars", chars, 2.5), ("order", order, 0.8)):
        losses[name] = weight * two_target_cross_entropy(logits[name], target, share)
        at = target[:, 0] >= 0
        accuracy[name] = (logits[name].argmax(1) == target[:, 0])[at].float().mean().item()
    at = thing > 0
    losses["geometry"] = 4 * F.smooth_l1_loss(logits["geometry"][at], picked["geometry"].float()[at], beta=0.05)
    losses["picture"] = 0.4 * picture_loss(heads, normed.mean(1).to(torch.bfloat16), classes)
    written = projector(features.reshape(len(classes) * NUM_PATCHES, DIM)[chosen]).float()
    losses |= writing_loss(written, attributes, chars, order, share, book)
    return losses, accuracy


def writing_loss(written: torch.Tensor, attributes: torch.Tensor, chars: torch.Tensor, order: torch.Tensor, share: torch.Tensor,
                 book: Codebook) -> dict[str, torch.Tensor]:
    """The projector's vectors [n, 256] must be near the ideal ones, and nearest to the right class and character of all.

    Distance alone is not enough: it is content with faint codes of what it is unsure of, and there are 232 classes.
    """
    ideal = book.patches(attributes, chars, order, share)
    amount = written @ book.codes.t() / CODE_NORM**2  # how much of each code is in a vector: about 1 or 0
    error = ((written - ideal) / CODE_NORM) @ book.basis.t()  # first the axes of the small groups, then the classes' subspace
    squares = error.pow(2)
    losses = {"projector": 0.5 * (squares[:, :book.num_axes].sum(1) + 0.3 * squares[:, book.num_axes:].sum(1)).mean()}
    part = {g: SHARPNESS * amount[:, book.start[g]:book.start[g] + GROUPS[g]] for g in ("class", "chars", "order")}
    weight = 0.3 + 0.7 * (attributes[:, 0] > 0).float()
    losses["written class"] = 1.5 * masked_cross_entropy(part["class"], attributes[:, 0], weight)
    losses["written chars"] = 1.5 * two_target_cross_entropy(part["chars"], chars, share)
    losses["written order"] = 0.5 * two_target_cross_entropy(part["order"], order, share)
    return losses
