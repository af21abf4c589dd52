"""The child process that decodes and preprocesses images, one after the other: `python -m ...decode_worker CONFIG`.

Speaks length-prefixed frames over stdin and stdout, JSON head and raw payload; nothing is pickled, so that an image
that takes over a codec has taken over this process and no other. Ends when stdin does.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO, Final

from PIL import Image

from services.vision_encoder.image import Colour, decode
from services.vision_encoder.preprocessing.interface import Preprocessing
from services.vision_encoder.preprocessing.registry import from_json, to_json
from shared.errors import InvalidImage
from shared.image_header import ImageHeader
from shared.wire.images import Detail

FRAME: Final = struct.Struct("<IQ")  # bytes of JSON head, bytes of payload


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """preprocessing   for each detail that pictures are read in"""

    preprocessing: Mapping[Detail, Preprocessing]
    background: Colour
    max_pixels: int

    def to_json(self) -> str:
        return json.dumps(
            {
                "preprocessing": {detail: to_json(each) for detail, each in self.preprocessing.items()},
                "background": self.background,
                "max_pixels": self.max_pixels,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> WorkerConfig:
        fields = json.loads(text)
        red, green, blue = fields["background"]
        preprocessing = {detail: from_json(text) for detail, text in fields["preprocessing"].items()}
        return cls(preprocessing, (red, green, blue), fields["max_pixels"])


def pack_request(header: ImageHeader, detail: Detail, data: bytes) -> tuple[bytes, bytes]:
    return pack_frame({"header": asdict(header), "detail": detail}, data)


def pack_frame(head: dict[str, Any], payload: bytes) -> tuple[bytes, bytes]:
    """Two pieces to write one after the other, so that the payload is not copied."""
    encoded = json.dumps(head).encode()
    return FRAME.pack(len(encoded), len(payload)) + encoded, payload


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent still drains
    config = WorkerConfig.from_json(sys.argv[1])
    # Pillow's own guard, at our limit rather than off: the second line of defence behind the header check.
    Image.MAX_IMAGE_PIXELS = config.max_pixels
    warnings.simplefilter("error", Image.DecompressionBombWarning)
    # Frames own the real stdout; anything a library prints goes to the log.
    frames_out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    frames_out.write(b"".join(pack_frame({"ready": True}, b"")))
    frames_out.flush()
    while (request := _read_frame(sys.stdin.buffer)) is not None:
        head, data = request
        preprocessing = config.preprocessing[head["detail"]]
        for piece in pack_frame(*_process(ImageHeader(**head["header"]), data, preprocessing, config.background)):
            frames_out.write(piece)
        frames_out.flush()


def _process(
    header: ImageHeader, data: bytes, preprocessing: Preprocessing, background: Colour
) -> tuple[dict[str, Any], bytes]:
    started = time.monotonic()
    try:
        image = decode(data, header, background)
    except InvalidImage as error:
        return {"invalid": error.message}, b""
    decoded = time.monotonic()
    pixels = preprocessing.apply(image)
    timings = {"decode": decoded - started, "preprocess": time.monotonic() - decoded}
    return {"shape": pixels.shape, "timings": timings}, pixels.tobytes()


def _read_frame(stream: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    start = stream.read(FRAME.size)
    if len(start) < FRAME.size:
        return None
    head_size, payload_size = FRAME.unpack(start)
    head: dict[str, Any] = json.loads(stream.read(head_size))
    return head, stream.read(payload_size)


if __name__ == "__main__":
    main()
