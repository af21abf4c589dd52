"""The whole recipe of the demo model, in order; a step whose result exists is skipped and a broken-off one goes on.

    pip install -r models/demo/requirements.txt
    python models/demo/train.py --npm NPM --fonts /usr/share/fonts/truetype --words /usr/share/dict/words --work WORK

1. assets     pictogram sets -> sprites; fonts and words                      recipe/assets.py
2. tokenizer  a byte-level BPE of the questions and answers                   recipe/tokenizer.py
3. tower      vision tower on dense labels of every patch, no text model      recipe/stage_tower.py
4. projector  started from the tower's label heads                            recipe/stage_projector.py
5. tower      the rest of its steps, now with the projector in place
6. text       text model on real pictures, as the frozen tower sees them      recipe/stage_text.py
7. export     the Hugging Face folder, and the sample pictures                recipe/export.py, recipe/samples.py

NPM holds the unpacked npm packages @iconify-json/STYLE as NPM/STYLE (see recipe/assets.py for the styles).  Everything is
seeded: picture seeds of the tower stage start at 1,000,000, of the text stage at 200,000,000, of the evaluation at 100,000,000
in splits of their own.
"""
import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch

from recipe import (
    assets,
    export,
    samples,
    stage_projector,
    stage_text,
    stage_tower,
    tokenizer,
)
from recipe.drawing import Assets

HERE = Path(__file__).resolve().parent
STEPS = ("assets", "tokenizer", "tower", "projector", "text", "export")


def done(path: Path, steps: int) -> bool:
    """Whether a stage's checkpoint has reached its last step."""
    return path.exists() and torch.load(path)["step"] >= steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--npm", type=Path)
    parser.add_argument("--fonts", type=Path, default=Path("/usr/share/fonts/truetype"))
    parser.add_argument("--words", type=Path, default=Path("/usr/share/dict/words"))
    parser.add_argument("--work", type=Path, required=True, help="folder for assets, logs and checkpoints")
    parser.add_argument("--out", type=Path, default=HERE / "checkpoint")
    parser.add_argument("--only", choices=STEPS, nargs="*", default=STEPS)
    parser.add_argument("--tower-steps", type=int, default=5000)
    parser.add_argument("--tower-steps-before-projector", type=int, default=3000)
    parser.add_argument("--text-steps", type=int, default=17000)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    work = args.work
    work.mkdir(parents=True, exist_ok=True)
    folder, vocabulary = work / "assets", work / "tokenizer.json"
    tower, text = work / "tower.pt", work / "text.pt"
    if "assets" in args.only:
        assets.build(args.npm, args.fonts, args.words, folder)
    if "tokenizer" in args.only and not vocabulary.exists():
        tokenizer.train_tokenizer(Assets(folder), vocabulary)
    if "tower" in args.only and not done(tower, args.tower_steps_before_projector):
        stage_tower.train(folder, tower, args.tower_steps_before_projector, args.tower_steps)
    if "projector" in args.only:
        stage_projector.fit(folder, tower)
    if "tower" in args.only and not done(tower, args.tower_steps):
        stage_tower.train(folder, tower, args.tower_steps, args.tower_steps)
    if "text" in args.only and not done(text, args.text_steps):
        stage_text.train(folder, vocabulary, text, args.text_steps, tower)
    if "export" in args.only:
        export.export(text, vocabulary, args.out)
        samples.make(Assets(folder), HERE / "samples")


if __name__ == "__main__":
    main()
