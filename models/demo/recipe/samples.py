"""Draws the sample pictures, which are of the evaluation split; samples.json beside them holds their questions, kept by hand.

Each is the first seed from 200,000,000 on (10,000 further for each file) whose scene fitted the wish beside it and allowed the
questions that were wanted.  They were chosen before the model had seen any of them, and none was exchanged afterwards.
"""
from pathlib import Path

from PIL import Image

from .drawing import Assets
from .scenes import render

# file: scene kind, seed
SAMPLES = {
    "animal.png": ("pictogram", 200_000_130),  # a cat on white
    "vehicle.png": ("pictogram", 200_010_640),  # a sailboat on one color
    "food.png": ("pictogram", 200_020_008),  # a pizza
    "shapes.png": ("shapes", 200_030_013),  # three different shapes
    "count.png": ("shapes", 200_040_006),  # five shapes, some of them alike
    "number.png": ("text", 200_050_007),  # four digits
    "word.png": ("text", 200_060_006),  # four letters
    "several.png": ("several", 200_070_000),  # two pictograms on one color
}
SCALE = 3


def make(assets: Assets, out: Path) -> None:
    """Write the pictures, enlarged."""
    out.mkdir(parents=True, exist_ok=True)
    for file, (kind, seed) in SAMPLES.items():
        picture = render(assets, seed, "eval", kind)[0]
        size = (picture.width * SCALE, picture.height * SCALE)
        picture.resize(size, Image.Resampling.LANCZOS).save(out / file, optimize=True)
