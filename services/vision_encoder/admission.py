"""What is let in: limits on one image, decided from its header, and on all images at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from services.vision_encoder.preprocessing.interface import Preprocessing
from shared.errors import ImageTooLarge, Overloaded, PayloadTooLarge
from shared.image_header import ImageHeader, read_header


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    max_bytes: int
    max_pixels: int
    max_aspect_ratio: float

    def check_size(self, size_bytes: int) -> None:
        if size_bytes > self.max_bytes:
            raise PayloadTooLarge(f"the image has {size_bytes} bytes; this server takes at most {self.max_bytes}")

    def admit(self, data: bytes, preprocessing: Preprocessing) -> ImageHeader:
        """The image's header. Raises an InvalidImage that names limit and size; nothing has been decoded."""
        header = read_header(data)
        self.check_shape(header.width, header.height, preprocessing)
        return header

    def check_shape(self, width: int, height: int, preprocessing: Preprocessing) -> None:
        """Raises ImageTooLarge, naming limit and size."""
        num_pixels = width * height
        if num_pixels > self.max_pixels:
            raise ImageTooLarge(
                f"the image has {width} x {height} = {num_pixels} pixels; this server takes at most {self.max_pixels}"
            )
        if max(width, height) > self.max_aspect_ratio * min(width, height):
            raise ImageTooLarge(
                f"the image has {width} x {height} pixels; one side may be at most {self.max_aspect_ratio:g} times the "
                "other"
            )
        num_working = preprocessing.num_working_pixels(width, height)
        if num_working > self.max_pixels:
            raise ImageTooLarge(
                f"the image has {width} x {height} pixels, {num_working} when padded; "
                f"this server takes at most {self.max_pixels}"
            )


class Queue:
    """Counts what has been taken on and is not finished, in images and bytes, and refuses more than it can hold."""

    def __init__(self, *, max_images: int, max_bytes: int) -> None:
        self._max_images = max_images
        self._max_bytes = max_bytes
        self.num_images = 0
        self.num_bytes = 0
        self.num_refused = 0
        self.seconds_per_image = 0.0  # recent average of the tower, for an honest Retry-After

    def check(self, size_bytes: int) -> None:
        """Raises Overloaded, with the time after which a place is likely to be free."""
        if self.num_images >= self._max_images or self.num_bytes + size_bytes > self._max_bytes:
            self.num_refused += 1
            wait_s = min(60.0, max(1.0, self.num_images * self.seconds_per_image / 2))
            raise Overloaded(
                f"{self.num_images} images of {self.num_bytes} bytes are queued at this vision encoder; "
                f"it takes {self._max_images} images and {self._max_bytes} bytes",
                retry_after_s=wait_s,
            )

    def enter(self, size_bytes: int) -> None:
        self.num_images += 1
        self.num_bytes += size_bytes

    def leave(self, size_bytes: int) -> None:
        self.num_images -= 1
        self.num_bytes -= size_bytes

    @contextmanager
    def place(self, size_bytes: int) -> Iterator[None]:
        self.enter(size_bytes)
        try:
            yield
        finally:
            self.leave(size_bytes)

    def observe(self, seconds: float) -> None:
        previous = self.seconds_per_image or seconds
        self.seconds_per_image = 0.9 * previous + 0.1 * seconds
