"""LLaVA's projector: vision features to the width of the text model's embeddings, by two matrices."""

from __future__ import annotations

from torch import Tensor, nn

from services.vision_encoder.towers import activation


class Projector(nn.Module):
    """features [batch, num_tokens, input_size] -> [batch, num_tokens, output_size]

    input_size      the tower's hidden size times the number of feature layers
    layer_norm_eps  of the norm that VIP-LLaVA and InternVL put in front; None: no norm
    """

    def __init__(
        self, input_size: int, output_size: int, hidden_act: str, *, has_bias: bool, layer_norm_eps: float | None
    ) -> None:
        super().__init__()
        self.output_size = output_size
        self.hidden_act = hidden_act
        self.layer_norm_eps = layer_norm_eps
        self.layer_norm = nn.Identity() if layer_norm_eps is None else nn.LayerNorm(input_size, layer_norm_eps)
        self.linear_1 = nn.Linear(input_size, output_size, bias=has_bias)
        self.activation = activation(hidden_act)
        self.linear_2 = nn.Linear(output_size, output_size, bias=has_bias)

    def forward(self, features: Tensor) -> Tensor:
        projected: Tensor = self.linear_2(self.activation(self.linear_1(self.layer_norm(features))))
        return projected
