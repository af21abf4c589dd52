"""Ask one model about a folder of pictures, in one batch, without a server: `python examples/offline.py FOLDER`."""

import sys
from pathlib import Path

from diptych import LLM, SamplingParams

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "models/demo/samples")
if not folder.is_dir():
    sys.exit(f"error: {folder} is no folder here; give one with pictures: python examples/offline.py FOLDER")
pictures = sorted(path for path in folder.iterdir() if path.suffix in {".png", ".jpg", ".jpeg", ".webp"})

llm = LLM("demo")
conversations = [[{"role": "user", "content": [picture, "What is in the picture?"]}] for picture in pictures]
for picture, output in zip(
    pictures, llm.chat(conversations, SamplingParams(temperature=0, max_tokens=32)), strict=True
):
    print(f"{picture.name}: {output.error.message if output.error else output.text}")
