"""Tensor blobs: what goes in comes out; anything else is refused, whatever bytes they are."""

from __future__ import annotations

import pickle
import struct
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared import tensor_blob
from shared.tensor_blob import BlobError, pack, unpack
from shared.torch_io import DTYPES, blob_to_tensor, tensor_to_blob

PADDING = 7  # the one byte of the head that means nothing
BLOB = pack("bfloat16", (3, 5), bytes(range(30)))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (2, 3, 5), (2, 1, 3, 4)])
def test_a_tensor_survives_the_round_trip(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.arange(torch.Size(shape).numel()).reshape(shape) - 3).to(dtype)
    result = blob_to_tensor(bytearray(tensor_to_blob(tensor)))
    assert result.dtype is dtype
    assert torch.equal(result, tensor)


def test_strides_do_not_matter() -> None:
    tensor = torch.arange(24.0).reshape(4, 6).T[::2]
    assert torch.equal(blob_to_tensor(bytearray(tensor_to_blob(tensor))), tensor)


def test_writable_memory_is_used_in_place_and_immutable_bytes_are_copied() -> None:
    writable = bytearray(tensor_to_blob(torch.zeros(2, 3)))
    blob_to_tensor(writable)[:] = 1
    assert bytes(writable[-4:]) == struct.pack("<f", 1.0)
    immutable = tensor_to_blob(torch.zeros(2, 3))
    blob_to_tensor(immutable)[:] = 1
    assert torch.equal(blob_to_tensor(immutable), torch.zeros(2, 3))


def test_special_values_survive() -> None:
    tensor = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    assert torch.equal(blob_to_tensor(bytearray(tensor_to_blob(tensor))).view(torch.int32), tensor.view(torch.int32))


def test_the_parsed_blob_says_what_it_holds_without_copying() -> None:
    blob = unpack(BLOB)
    assert (blob.dtype, blob.shape, bytes(blob.data)) == ("bfloat16", (3, 5), bytes(range(30)))
    assert blob.data.obj is BLOB


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [
        ("float64", (1,), 8),
        ("float32", (3,), 8),
        ("float32", (), 4),
        ("float32", (1,) * 5, 4),
        ("int8", (2, 2), 5),
        ("int8", (0, 2), 0),
    ],
)
def test_what_does_not_belong_together_cannot_be_packed(dtype: str, shape: tuple[int, ...], size: int) -> None:
    with pytest.raises(ValueError):
        pack(dtype, shape, bytes(size))


@pytest.mark.parametrize("length", range(len(BLOB)))
def test_every_truncation_is_refused(length: int) -> None:
    with pytest.raises(BlobError):
        unpack(BLOB[:length])


@pytest.mark.parametrize("position", range(len(BLOB)))
def test_every_flipped_bit_is_refused(position: int) -> None:
    for bit in range(8):
        damaged = bytearray(BLOB)
        damaged[position] ^= 1 << bit
        if position == PADDING:
            assert bytes(unpack(bytes(damaged)).data) == bytes(range(30))
            continue
        with pytest.raises(BlobError):
            unpack(bytes(damaged))


def test_an_empty_tensor_is_refused_even_if_well_formed() -> None:
    checksum = zlib.crc32(b"", zlib.crc32(struct.pack("<BQQ", 1, 0, 4)))
    with pytest.raises(BlobError):
        unpack(struct.pack("<4sBBBxIQQ", b"DPTB", 1, 1, 2, checksum, 0, 4))


def test_sizes_that_overflow_are_refused() -> None:
    huge = bytearray(BLOB)
    struct.pack_into("<QQ", huge, 12, 2**63, 2)
    with pytest.raises(BlobError):
        unpack(bytes(huge))


@given(st.binary(max_size=80))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(BlobError):
        unpack(data)
    with pytest.raises(BlobError):
        unpack(tensor_blob.MAGIC + data)


def test_a_pickle_is_refused() -> None:
    with pytest.raises(BlobError):
        unpack(pickle.dumps({"a": 1}))
