"""The feed-forward half of a layer: one gated MLP, or a mixture of them of which each token takes a few.

A router gives every token its experts (top-k of a softmax, as in Mixtral and Qwen's mixtures). The step's rows are then
sorted by expert, so that an expert that tokens chose is one product over its rows, whatever sequences they are from,
and any other costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from services.text_engine.models.config import MoeConfig
from services.text_engine.models.layers import MakeProductOfAll, Product, ReadMatrix, ReadWeight

# gate and up side by side [num_rows, 2 * intermediate_size] -> activation(gate) * up [num_rows, intermediate_size]
GatedProduct = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(activation(gate(x)) * up(x)); gate_up gives the outputs of both side by side."""

    gate_up: Product
    gated_product: GatedProduct
    down: Product

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_rows, hidden_size] -> alike"""
        return self.down(self.gated_product(self.gate_up(x)))


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert that every token takes, each as much as its own gate says (Qwen2's mixtures).

    gate  [num_rows, hidden_size] -> [num_rows, 1]
    """

    mlp: Product
    gate: Product

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_rows, hidden_size] -> alike, fp32"""
        gate = self.gate(x).float()
        # A sigmoid, row by row: torch's own rounds the last rows of a batch otherwise than those before.
        share = torch.cat((gate, torch.zeros_like(gate)), 1).softmax(-1)[:, :1]
        return share * self.mlp(x).float()


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """The weighted sum of what a token's experts give. A row's result is the same bit for bit in any batch, where that
    of its products is.

    router             [num_rows, hidden_size] -> scores [num_rows, num_experts]
    normalizes         the weights of a token's experts add up to one; else they are what the softmax over all gave
    """

    router: Product
    experts: Sequence[Product]
    num_experts_per_token: int
    normalizes: bool
    shared: SharedExpert | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_rows, hidden_size] -> alike"""
        weights, chosen = self._route(x)
        outputs = self._each_alone(x, chosen).float()
        total = None if self.shared is None else self.shared(x)
        # One operation after the other, in the order of a token's choices: a reduction's order may depend on its shape.
        for place in range(self.num_experts_per_token):
            weighted = outputs[:, place] * weights[:, place, None]
            total = weighted if total is None else total + weighted
        assert total is not None
        return total.to(x.dtype)

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [num_rows, num_experts_per_token] fp32, the largest first, and whose they are, int64."""
        probabilities = self.router(x).float().softmax(-1)
        weights, chosen = probabilities.topk(self.num_experts_per_token, dim=-1)
        if self.normalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, chosen

    def _each_alone(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """What each chosen expert gives for its row, unweighted.

        chosen   [num_rows, num_experts_per_token]
        returns  [num_rows, num_experts_per_token, hidden_size]
        """
        by_expert = chosen.flatten().argsort(stable=True)
        rows = x[by_expert // self.num_experts_per_token]
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        outputs = x.new_empty(chosen.numel(), x.shape[1])
        start = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                places = by_expert[start : start + count]
                outputs[places] = expert(rows[start : start + count])
                start += count
        return outputs.view(*chosen.shape, x.shape[1])


def read_mixture(
    moe: MoeConfig,
    prefix: str,
    read_weight: ReadWeight,
    read_matrix: ReadMatrix,
    make_product: MakeProductOfAll,
    gated_product: GatedProduct,
) -> MixtureOfExperts:
    """One layer's, its tensors' names starting with `prefix`; the gates stay plain where the experts are quantized."""

    def gate(name: str) -> Product:
        return make_product([read_weight(f"{prefix}{name}.weight")], None)

    def expert(name: str) -> GatedMlp:
        gate_up = make_product(read_matrix(f"{prefix}{name}.gate_up_proj.weight"), None)
        return GatedMlp(gate_up, gated_product, make_product(read_matrix(f"{prefix}{name}.down_proj.weight"), None))

    has_shared = moe.shared_intermediate_size is not None
    return MixtureOfExperts(
        gate("gate"),
        [expert(f"experts.{i}") for i in range(moe.num_experts)],
        moe.num_experts_per_token,
        moe.normalizes,
        SharedExpert(expert("shared_expert"), gate("shared_expert_gate")) if has_shared else None,
    )
