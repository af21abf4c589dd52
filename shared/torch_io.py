"""Tensors in and out of bytes and files: blob <-> tensor, and safetensors checkpoints read tensor by tensor.

Checkpoints are never materialised whole: names come from the index, each
tensor is read when asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open

from shared import tensor_blob
from shared.load_progress import LoadProgress

DTYPES: Final[dict[str, torch.dtype]] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16; raises KeyError for dtypes that never travel."""
    return _NAMES[dtype]


def tensor_to_blob(tensor: torch.Tensor) -> bytes:
    """Serialise a tensor of any strides on any device as one blob (copies it to the CPU once)."""
    cpu = tensor.detach().to("cpu").contiguous()
    raw: memoryview = cpu.view(torch.uint8).numpy().reshape(-1).data
    return tensor_blob.pack(dtype_name(tensor.dtype), tuple(tensor.shape), raw)


def blob_to_tensor(blob: bytes | bytearray | memoryview) -> torch.Tensor:
    """A CPU tensor: over the blob's own memory if that is writable (bytearray), else over a copy, because torch has no
    read-only tensors. Raises BlobError if damaged.
    """
    parsed = tensor_blob.unpack(memoryview(blob))
    memory = bytearray(parsed.data) if parsed.data.readonly else parsed.data
    flat = torch.frombuffer(memory, dtype=DTYPES[parsed.dtype])
    return flat.reshape(parsed.shape)


class Checkpoint:
    """The safetensors files of one Hugging Face folder, sharded or not, as a mapping name -> tensor read on demand.

    Raises FileNotFoundError if the folder holds no safetensors, KeyError for an unknown name.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
            self._files = {name: folder / file for name, file in weight_map.items()}
        else:
            shards = sorted(folder.glob("*.safetensors"))
            if not shards:
                raise FileNotFoundError(f"{folder} holds no *.safetensors files")
            self._files = {}
            for shard in shards:
                try:
                    with safe_open(shard, framework="pt") as opened:
                        self._files.update(dict.fromkeys(opened.keys(), shard))
                except SafetensorError as error:
                    raise ValueError(f"{shard} is damaged or no safetensors file: {error}") from error

        self._progress = LoadProgress(self.size_bytes)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    @property
    def files(self) -> list[Path]:
        """The shards, sorted, each once."""
        return sorted(set(self._files.values()))

    @property
    def size_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def tensor(self, name: str) -> torch.Tensor:
        with safe_open(self._files[name], framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
        self._progress.read(tensor.nbytes)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        with safe_open(self._files[name], framework="pt") as opened:
            return tuple(opened.get_slice(name).get_shape())

    def part(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        """One slice for each leading dimension; only the bytes of that part are read."""
        with safe_open(self._files[name], framework="pt") as opened:
            tensor: torch.Tensor = opened.get_slice(name)[part]
        self._progress.read(tensor.nbytes)
        return tensor

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor once, shard by shard, so that each file is opened once."""
        for file in self.files:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - safe_open is no mapping
                    if self._files.get(name) == file:
                        tensor = opened.get_tensor(name)
                        self._progress.read(tensor.nbytes)
                        yield name, tensor
