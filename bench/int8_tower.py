"""What `--quantization int8` changes: the tower's rate, its embeddings, and the answers that follow from them.

  python -m bench.int8_tower [--model demo] [--pictures FOLDER] [--threads 1] [--rounds 7]

Rate         images per second of the tower alone, on decoded pictures, in batches as the service forms them; the towers
             take turns, every figure is the median of the rounds
Embeddings   against the fp32 tower: length of the difference over length, for the whole picture and for its worst row;
             the least cosine of a row
Answers      the model's greedy answers against those after the bf16 tower; fp32 shows how much of that any other
             rounding does

Each picture is also asked about mirrored, cropped, darkened and turned, so that a few files make many pictures.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from diptych import LLM
from diptych.models import resolve
from services.vision_encoder.config import Quantization
from services.vision_encoder.families.interface import Family, PreparedImage
from services.vision_encoder.families.registry import load_family
from services.vision_encoder.loading import prepare_family
from shared.sampling import SamplingParams

SAMPLES = Path(__file__).resolve().parents[1] / "models" / "demo" / "samples"
QUESTIONS = (
    "What is in the picture?",
    "Describe the image.",
    "How many objects are there?",
    "What colour is the background?",
    "Is there a dog?",
    "Read it.",
)
TOWERS: dict[str, tuple[str, Quantization]] = {
    "float32": ("float32", "none"),
    "bfloat16": ("bfloat16", "none"),
    "int8": ("bfloat16", "int8"),
}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
MAX_NEW_TOKENS = 24


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="demo")
    options.add_argument("--pictures", type=Path, default=SAMPLES, help="folder of PNG and JPEG files")
    options.add_argument("--threads", type=int, default=1, help="of the towers")
    options.add_argument("--batch-size", type=int, default=1, help="pictures in one pass")
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--no-answers", action="store_true", help="rate and embeddings only")
    options.add_argument("--json", type=Path, help="write the figures there, too")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    folder = resolve(given.model, say=print).folder
    pictures = [variant for file in picture_files(given.pictures) for variant in variants(Image.open(file))]
    towers = {name: load(folder, *choice) for name, choice in TOWERS.items()}
    figures: dict[str, object] = {"pictures": len(pictures), "threads": given.threads, "batch_size": given.batch_size}
    figures["images_per_s"] = rates(towers, pictures, given.batch_size, given.rounds)
    figures["embeddings"] = errors(towers, pictures)
    if not given.no_answers:
        figures["answers"] = agreements(given.model, pictures)
    print(json.dumps(figures, indent=2))
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")


def load(folder: Path, dtype: str, quantization: Quantization) -> Family:
    family = load_family(folder)
    prepare_family(family, quantization, torch.device("cpu"), DTYPES[dtype])
    return family


# --- pictures ---------------------------------------------------------------------------------------------------------


def picture_files(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in (".png", ".jpg", ".jpeg"))
    if not files:
        raise SystemExit(f"{folder} holds no PNG or JPEG files")
    return files


def variants(picture: Image.Image) -> Iterator[Image.Image]:
    picture = picture.convert("RGB")
    width, height = picture.size
    yield picture
    yield ImageOps.mirror(picture)
    yield picture.crop((width // 8, height // 8, width, height))
    yield ImageEnhance.Brightness(picture).enhance(0.6)
    yield picture.rotate(7, Image.Resampling.BICUBIC, fillcolor=picture.getpixel((0, 0)))


def as_png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def prepare(family: Family, picture: Image.Image) -> PreparedImage:
    return PreparedImage(torch.from_numpy(family.preprocessing.apply(picture)), *picture.size)


# --- what is measured -------------------------------------------------------------------------------------------------


def rates(
    towers: dict[str, Family], pictures: Sequence[Image.Image], batch_size: int, num_rounds: int
) -> dict[str, float]:
    """Pictures of one shape share a pass, as in the service."""
    by_shape: dict[torch.Size, list[PreparedImage]] = {}
    for picture in pictures:
        image = prepare(towers["bfloat16"], picture)
        by_shape.setdefault(image.pixels.shape, []).append(image)
    batches = [
        images[start : start + batch_size]
        for images in by_shape.values()
        for start in range(0, len(images), batch_size)
    ]
    seconds: dict[str, list[float]] = {name: [] for name in towers}
    for number in range(num_rounds + 1):
        for name, family in towers.items():
            begun = time.perf_counter()
            for batch in batches:
                family.encode(batch)
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - begun)
    return {name: round(len(pictures) / statistics.median(values), 2) for name, values in seconds.items()}


def errors(towers: dict[str, Family], pictures: Sequence[Image.Image]) -> dict[str, dict[str, float]]:
    """Mean over pictures of the relative error; the worst row's; the least cosine."""
    found = {}
    for name in ("bfloat16", "int8"):
        per_picture, worst, cosines = [], [], []
        for picture in pictures:
            exact, rows = (encode(towers[each], picture) for each in ("float32", name))
            per_picture.append(float((rows - exact).norm() / exact.norm()))
            worst.append(float(((rows - exact).norm(dim=-1) / exact.norm(dim=-1)).max()))
            cosines.append(float(torch.cosine_similarity(rows, exact, dim=-1).min()))
        found[name] = {
            "mean_error": round(statistics.mean(per_picture), 5),
            "worst_row_error": round(max(worst), 5),
            "least_cosine": round(min(cosines), 6),
        }
    return found


def encode(family: Family, picture: Image.Image) -> Tensor:
    """[num_tokens, hidden_size] fp32"""
    [rows] = family.encode([prepare(family, picture)])
    return rows.float()


def agreements(model: str, pictures: Sequence[Image.Image]) -> dict[str, dict[str, float | int]]:
    expected = answers(model, pictures, *TOWERS["bfloat16"])
    found: dict[str, dict[str, float | int]] = {}
    for name in ("float32", "int8"):
        given = answers(model, pictures, *TOWERS[name])
        same = [sum(map(int.__eq__, a, b)) for a, b in zip(expected, given, strict=True)]
        longest = [max(len(a), len(b)) for a, b in zip(expected, given, strict=True)]
        found[name] = {
            "questions": len(given),
            "same_answers": sum(a == b for a, b in zip(expected, given, strict=True)),
            "same_tokens": round(sum(same) / sum(longest), 4),
        }
    return found


def answers(model: str, pictures: Sequence[Image.Image], dtype: str, quantization: Quantization) -> list[list[int]]:
    """The tokens of each answer, picture by picture, question by question. The text model is the same every time."""
    os.environ |= {"DIPTYCH_ENCODER_DTYPE": dtype, "DIPTYCH_ENCODER_QUANTIZATION": quantization}
    conversations = [
        [{"role": "user", "content": [data, question]}] for data in map(as_png, pictures) for question in QUESTIONS
    ]
    outputs = LLM(model).chat(conversations, SamplingParams(temperature=0.0, max_tokens=MAX_NEW_TOKENS))
    for output in outputs:
        if output.error is not None:
            raise output.error
    return [output.choices[0].token_ids for output in outputs]


if __name__ == "__main__":
    main()
