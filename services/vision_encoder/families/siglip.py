"""A SigLIP tower to its very end, as SmolVLM and Gemma 3 have it."""

from __future__ import annotations

from torch import nn

from services.vision_encoder.towers import TowerConfig, VisionTower
from services.vision_encoder.weights import TOWER_PREFIXES, WeightReader, load_tower


def load_siglip(reader: WeightReader, config: TowerConfig) -> tuple[VisionTower, nn.LayerNorm]:
    """All layers of the tower and the norm behind them."""
    tower = load_tower(reader, config, (config.num_layers,))
    norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps, device="meta")
    state = {
        kind: reader.read(TOWER_PREFIXES, f"post_layernorm.{kind}", (config.hidden_size,))
        for kind in ("weight", "bias")
    }
    norm.load_state_dict(state, assign=True)
    return tower, norm
