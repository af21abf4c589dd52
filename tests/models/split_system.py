"""Encoder and engine of one checkpoint, wired as the services are, beside transformers on the same folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from services.text_engine.prompt import Prompt
from services.vision_encoder.families.interface import Family, PreparedImage
from services.vision_encoder.families.registry import load_family
from services.vision_encoder.preprocessing.registry import from_json, to_json
from shared.hashing import image_key
from shared.wire.engine import ChatMessage, ImagePart, TextPart
from shared.wire.images import Detail, ImageRef
from tests.engines import Answer, EngineDriver
from tests.vision_checkpoints import processor_class

NUM_NEW_TOKENS = 16


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    random = np.random.default_rng(width * 10_007 + height + 1_000_003 * seed)
    return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))


class SplitSystem:
    """What a chat with pictures gives through our encoder and engine."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.family = load_family(folder)
        self.family.prepare_weights(torch.device("cpu"), torch.float32)
        self.families: dict[Detail, Family] = {"high": self.family, "low": self.family.low_detail or self.family}
        # As in the decode workers: the preprocessing travels as text.
        self.preprocessing = from_json(to_json(self.family.preprocessing))
        self.folder = folder
        self._settings = settings

    @cached_property
    def driver(self) -> EngineDriver:
        return EngineDriver(self.folder, **self._settings)

    def prepared(self, image: Image.Image, detail: Detail = "high") -> PreparedImage:
        preprocessing = from_json(to_json(self.families[detail].preprocessing))
        return PreparedImage(torch.from_numpy(preprocessing.apply(image)), image.width, image.height, detail)

    def encode(self, image: Image.Image, detail: Detail = "high") -> torch.Tensor:
        [rows] = self.families[detail].encode([self.prepared(image, detail)])
        return rows

    def ref(self, image: Image.Image, detail: Detail) -> ImageRef:
        """Encodes the picture and has its rows at hand for the engine."""
        metadata = self.families[detail].describe(image.width, image.height)
        key = image_key(image.tobytes() + bytes(str(image.size), "ascii"), f"tests {detail}")
        if key not in self.driver.pictures:
            self.driver.pictures[key] = self.encode(image, detail)
        return ImageRef.of(metadata, image_key=key, encoder_url="http://x")

    def prompt(self, parts: Sequence[str | Image.Image], detail: Detail | None = None) -> Prompt:
        """detail   None: what a conversation of so many pictures is read in"""
        has_several = sum(not isinstance(part, str) for part in parts) > 1
        automatic: Detail = "low" if has_several and self.family.reads_several_in_low_detail else "high"
        content = [
            TextPart(text=part) if isinstance(part, str) else ImagePart(image=self.ref(part, detail or automatic))
            for part in parts
        ]
        return self.driver.prompts.from_messages([ChatMessage(role="user", content=content)])

    def add(
        self, request_id: str, parts: Sequence[str | Image.Image], detail: Detail | None = None, **sampling: Any
    ) -> None:
        prompt = self.prompt(parts, detail)
        sampling = {"max_tokens": NUM_NEW_TOKENS} | sampling
        self.driver.add(request_id, prompt.token_ids, images=prompt.images, image_refs=prompt.image_refs, **sampling)

    def answer(self, parts: Sequence[str | Image.Image], detail: Detail | None = None, **sampling: Any) -> Answer:
        request_id = f"request-{len(self.driver.answers)}"
        self.add(request_id, parts, detail, **sampling)
        return self.driver.run()[request_id]


def load_processor(folder: Path) -> Any:
    name = json.loads((folder / "processor_config.json").read_text())["processor_class"]
    return processor_class(name).from_pretrained(folder)


def all_features(output: Any) -> torch.Tensor:
    """[num_rows, row_size] of what `get_image_features` gives: of all pictures, and with DeepStack of all layers."""
    of_layers = (output.pooler_output, *(getattr(output, "deepstack_features", None) or ()))
    return torch.cat([torch.cat(list(of_pictures)).flatten(0, -2) for of_pictures in of_layers], dim=-1)


class Oracle:
    """The same chat through transformers: the checkpoint's own processor, greedy."""

    def __init__(self, folder: Path) -> None:
        self.processor = load_processor(folder)
        model = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        self.model: Any = model.eval()
        self.model.generation_config.eos_token_id = None  # runs are compared to their full length

    def inputs(self, parts: Sequence[str | Image.Image]) -> Any:
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
            for part in parts
        ]
        chat = [{"role": "user", "content": content}]
        return self.processor.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )

    def answer(self, parts: Sequence[str | Image.Image], num_new_tokens: int = NUM_NEW_TOKENS) -> list[int]:
        inputs = self.inputs(parts)
        never = [self.model.config.image_token_id]  # as our engine, which has no image to put there
        output = self.model.generate(**inputs, max_new_tokens=num_new_tokens, do_sample=False, suppress_tokens=never)
        tokens: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
        return tokens
