"""A mixture's experts under one name each, for checkpoints that hold all of a layer's in one tensor.

transformers 5 keeps "….experts.gate_up_proj" [num_experts, 2 * intermediate_size, hidden_size] and
"….experts.down_proj" [num_experts, hidden_size, intermediate_size]; most files have "….experts.3.gate_proj.weight" and
so on. Qwen3-VL's have the tensors of the first kind with their last two dimensions the other way round.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import torch

STACKED: Final = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
MATRICES: Final = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class TensorSource(Protocol):
    """A checkpoint's files, as `shared.torch_io.Checkpoint` is one."""

    folder: Path

    @property
    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str) -> torch.Tensor: ...

    def part(self, name: str, part: tuple[slice, ...]) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class _Slice:
    """Where one expert's matrix [num_rows, num_columns] is: in `name`, from [expert, first_row] on; if it is transposed
    there, from [expert, :, first_row] on.
    """

    name: str
    expert: int
    first_row: int
    num_rows: int
    num_columns: int
    is_transposed: bool


class SeparateExperts:
    """Satisfies `TensorSource`; names that need no separating are the checkpoint's own.

    hidden_size   of the model: which of a stacked tensor's dimensions it is says how its matrices lie
    """

    def __init__(self, checkpoint: TensorSource, hidden_size: int) -> None:
        self.folder = checkpoint.folder
        self._checkpoint = checkpoint
        self._hidden_size = hidden_size
        self._slices: dict[str, _Slice] = {}
        self._stacked = {name for name in checkpoint.names if STACKED.search(name)}
        for name in self._stacked:
            self._separate(name)

    @property
    def names(self) -> frozenset[str]:
        return self._checkpoint.names - self._stacked | self._slices.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        piece = self._slices.get(name)
        return self._checkpoint.shape(name) if piece is None else (piece.num_rows, piece.num_columns)

    def tensor(self, name: str) -> torch.Tensor:
        return self.part(name, (slice(None),)) if name in self._slices else self._checkpoint.tensor(name)

    def part(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        piece = self._slices.get(name)
        if piece is None:
            return self._checkpoint.part(name, part)
        start, stop, _ = part[0].indices(piece.num_rows)
        rows = slice(piece.first_row + start, piece.first_row + stop)
        expert = slice(piece.expert, piece.expert + 1)
        if piece.is_transposed:
            columns = part[1] if len(part) > 1 else slice(None)
            return self._checkpoint.part(piece.name, (expert, columns, rows))[0].T.contiguous()
        return self._checkpoint.part(piece.name, (expert, rows, *part[1:]))[0]

    def _separate(self, name: str) -> None:
        experts, _, kind = name.rpartition(".")
        matrices = MATRICES[kind]
        shape = self._checkpoint.shape(name)
        is_transposed = len(shape) == 3 and self._is_transposed(kind, shape)
        if is_transposed:
            shape = (shape[0], shape[2], shape[1])
        if len(shape) != 3 or shape[1] % len(matrices):
            raise ValueError(f"{self.folder}: {name} has shape {shape}; one matrix for each expert is needed")
        num_experts, num_rows, num_columns = shape[0], shape[1] // len(matrices), shape[2]
        for expert in range(num_experts):
            for i, matrix in enumerate(matrices):
                piece = _Slice(name, expert, i * num_rows, num_rows, num_columns, is_transposed)
                self._slices[f"{experts}.{expert}.{matrix}.weight"] = piece

    def _is_transposed(self, kind: str, shape: tuple[int, ...]) -> bool:
        """Where both dimensions are alike they are taken as transformers keeps them, as it does itself."""
        inputs_first = shape[1:] if kind == "gate_up_proj" else shape[:0:-1]
        return inputs_first[0] == self._hidden_size != inputs_first[1]
