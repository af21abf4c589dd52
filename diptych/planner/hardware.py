"""What a plan knows of the machines: a cost model and how much memory things take, as a preset or from a file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from diptych.errors import BadSetting
from diptych.simulator.costs import PRESETS, CostModel

BLOCK_SIZE: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes; None: not known.

    engine_bytes, encoder_bytes   of weights, on each replica
    kv_token_bytes                keys and values of one token, all layers
    image_row_bytes               of an embedding, for each of its tokens
    """

    engine_bytes: int | None = None
    encoder_bytes: int | None = None
    kv_token_bytes: int | None = None
    image_row_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One kind of machine with one kind of model."""

    name: str
    costs: CostModel
    memory: Memory

    @property
    def model(self) -> str | None:
        """Whose costs these are, as one would name it to start it; None: a preset's stand for many."""
        return None if self.name in PRESETS else self.name

    @property
    def kv_bytes(self) -> int | None:
        """Of one engine's KV cache."""
        row = self.memory.kv_token_bytes
        return None if row is None else self.costs.num_blocks * BLOCK_SIZE * row

    @property
    def image_bytes(self) -> int | None:
        """Of one picture's embedding in Redis."""
        row = self.memory.image_row_bytes
        return None if row is None else self.costs.image_tokens * row

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")


# Of the checkpoints that the cost models are about: SmolLM2-135M (30 layers, 3 KV heads of 64, rows of 576) behind a
# ViT-B tower, and an 8B model (32 layers, 8 KV heads of 128, rows of 4,096) behind a ViT-L; all in 16 bits.
_MEMORY: Final = {
    "cpu": Memory(
        engine_bytes=269_000_000, encoder_bytes=172_000_000, kv_token_bytes=30 * 2 * 3 * 64 * 2, image_row_bytes=576 * 2
    ),
    "h100": Memory(
        engine_bytes=16_100_000_000,
        encoder_bytes=650_000_000,
        kv_token_bytes=32 * 2 * 8 * 128 * 2,
        image_row_bytes=4096 * 2,
    ),
}


def load(name: str) -> Hardware:
    """A preset's name, or the file that an earlier measurement wrote. Raises BadSetting."""
    if name in PRESETS:
        return Hardware(name=name, costs=PRESETS[name], memory=_MEMORY[name])
    wanted = f"is neither one of {', '.join(PRESETS)} nor a file made with --save-costs"
    try:
        found = json.loads(Path(name).read_text())
        return Hardware(name=found["name"], costs=CostModel(**found["costs"]), memory=Memory(**found["memory"]))
    except OSError as error:
        raise BadSetting(f"--hardware {name!r} {wanted} ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise BadSetting(f"--hardware {name!r} {wanted} ({error})") from error
