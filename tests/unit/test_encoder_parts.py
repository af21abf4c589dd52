"""The small parts of the vision encoder: what is let in, what is kept, and that bad numbers never get out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from services.vision_encoder.admission import ImageLimits, Queue
from services.vision_encoder.encoder import Tower
from services.vision_encoder.families.interface import PreparedImage
from services.vision_encoder.metrics import EncoderMetrics
from services.vision_encoder.preprocessing.single_tile import SingleTile
from services.vision_encoder.recent import RecentEmbeddings
from shared.cuda_capture import Capture
from shared.errors import EncodeFailed, ImageTooLarge, Overloaded, PayloadTooLarge
from shared.torch_io import blob_to_tensor
from shared.wire.images import ImageMetadata

CROP_8 = SingleTile(
    pad_colour=None,
    shortest_edge=8,
    resize_to=None,
    crop_to=(8, 8),
    resample=3,
    rescale_factor=1 / 255,
    mean=(0.0, 0.0, 0.0),
    std=(1.0, 1.0, 1.0),
)


class FakeFamily:
    """Returns, for each image, the rows that its first pixel asks for."""

    preprocessing = CROP_8
    hidden_size = 3
    num_row_parts = 1
    low_detail = None
    reads_several_in_low_detail = False
    outputs = (torch.ones(2, 3), torch.ones(1, 3), torch.ones(2, 4), torch.full((2, 3), float("inf")))

    def describe(self, width: int, height: int) -> ImageMetadata:
        return ImageMetadata(num_tokens=2, width=width, height=height)

    def fingerprint(self, dtype: torch.dtype, background: tuple[int, int, int]) -> str:
        return ""

    def prepare_weights(self, device: torch.device, dtype: torch.dtype) -> None:
        pass

    def record_graphs(self, capture: Capture) -> None:
        pass

    def encode(self, images: Sequence[PreparedImage]) -> list[Tensor]:
        return [self.outputs[int(image.pixels[0, 0, 0, 0])] for image in images]


def prepared(which: int) -> PreparedImage:
    return PreparedImage(torch.full((1, 3, 8, 8), which, dtype=torch.uint8), 8, 8)


def test_wrong_row_counts_widths_and_infinities_fail_their_own_image_only() -> None:
    """Cases C16, D26."""
    good, short, wide, infinite, also_good = Tower({"high": FakeFamily()}, EncoderMetrics())(
        [prepared(which) for which in (0, 1, 2, 3, 0)]
    )
    assert isinstance(short, EncodeFailed)
    assert isinstance(wide, EncodeFailed)
    assert isinstance(infinite, EncodeFailed)
    for blob in (good, also_good):
        assert isinstance(blob, bytes)
        assert torch.equal(blob_to_tensor(bytearray(blob)), torch.ones(2, 3))


# --- admission --------------------------------------------------------------------------------------------------------


def bmp(width: int, height: int) -> bytes:
    """Enough of a BMP to be admitted."""
    return b"BM" + bytes(12) + b"\x28\0\0\0" + width.to_bytes(4, "little") + height.to_bytes(4, "little") + bytes(28)


LIMITS = ImageLimits(max_bytes=1000, max_pixels=10_000, max_aspect_ratio=50)


def test_an_image_at_the_limits_is_admitted() -> None:
    header = LIMITS.admit(bmp(100, 100), CROP_8)
    assert (header.width, header.height) == (100, 100)
    assert LIMITS.admit(bmp(50, 1), CROP_8).width == 50
    LIMITS.check_size(1000)


@pytest.mark.parametrize(
    ("size", "named"), [((101, 100), "101 x 100 = 10100"), ((51, 1), "51 x 1"), ((1, 51), "at most 50 times")]
)
def test_an_image_beyond_a_limit_is_refused_with_limit_and_size(size: tuple[int, int], named: str) -> None:
    with pytest.raises(ImageTooLarge) as refusal:
        LIMITS.admit(bmp(*size), CROP_8)
    assert named in refusal.value.message


def test_a_sliver_that_padding_to_a_square_would_blow_up_is_refused() -> None:
    fields: dict[str, Any] = {name: getattr(CROP_8, name) for name in CROP_8.__slots__}
    padded = SingleTile(**fields | {"pad_colour": (1, 2, 3)})
    assert LIMITS.admit(bmp(100, 3), padded).width == 100
    with pytest.raises(ImageTooLarge, match="10201 when padded"):
        LIMITS.admit(bmp(101, 3), padded)


def test_too_many_bytes_are_refused_with_the_limit() -> None:
    with pytest.raises(PayloadTooLarge, match=r"1001 bytes.*1000"):
        LIMITS.check_size(1001)


def test_the_queue_refuses_what_it_cannot_hold_and_says_when_to_come_back() -> None:
    queue = Queue(max_images=2, max_bytes=100)
    with queue.place(60):
        queue.check(40)
        with pytest.raises(Overloaded):
            queue.check(41)
        queue.observe(10.0)
        with queue.place(10), pytest.raises(Overloaded) as refusal:
            queue.check(0)
        assert refusal.value.retry_after_s == 10.0
    queue.check(100)
    assert (queue.num_images, queue.num_bytes) == (0, 0)


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_recent_embeddings_stay_within_their_bytes_and_the_least_used_leave_first() -> None:
    recent = RecentEmbeddings(max_bytes=10)
    recent.put("a", b"1234")
    recent.put("b", b"1234")
    assert recent.get("a") == b"1234"
    recent.put("c", b"1234")
    assert (recent.get("a"), recent.get("b"), recent.get("c")) == (b"1234", None, b"1234")
    recent.put("c", b"12")
    assert recent.size_bytes == 6
    recent.put("d", bytes(11))
    assert recent.get("d") is None
    assert recent.size_bytes <= 10
