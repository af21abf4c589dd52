"""Runs the text model on a batch of conversations; the loss counts the answers only."""
import torch
import torch.nn.functional as F

from .codebook import HIDDEN
from .loading import Batch
from .network import Text
from .text_batches import attention_mask
from .tokenizer import IMAGE


def embed(text: Text, ids: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
    """Word embeddings with the patches put where the image tokens are; ids [batch, length], patches [pictures, 64, 256]."""
    x = text.embed(ids)
    at = (ids == IMAGE)[..., None].expand_as(x)
    return x.masked_scatter(at, patches.reshape(-1, HIDDEN).to(x.dtype))


def answer_loss(text: Text, batch: Batch, patches: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The weighted loss, and for every answer token whether it is predicted right and its flat position."""
    x = embed(text, batch["ids"], patches).to(torch.bfloat16)
    states = text(x, batch["positions"], attention_mask(batch["segments"]))
    targets = batch["targets"].view(-1)
    at = (targets >= 0).nonzero()[:, 0]
    logits = text.lm_head(states.reshape(-1, HIDDEN)[at]).float()
    weights = batch["weights"].view(-1)[at]
    loss = (F.cross_entropy(logits, targets[at], reduction="none") * weights).sum() / weights.sum()
    return loss, logits.argmax(1) == targets[at], at
