"""Two ways to ask the model: plain transformers in this process, or an OpenAI-style server.  Both decode greedily."""
import base64
import io
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from PIL import Image


@dataclass(slots=True)
class Item:
    """Something to ask about zero or more pictures, the expected answer, and the (question, answer) turns before it."""

    pictures: list[Image.Image]
    question: str
    expected: str
    earlier: tuple[tuple[str, str], ...] = ()

    def messages(self, pictures: list[dict]) -> list[dict]:
        """The conversation as chat messages; `pictures` are the parts that stand for the pictures, sent in the first one."""
        asked = [*(q for q, _a in self.earlier), self.question]
        turns = [{"role": "user", "content": [{"type": "text", "text": q}]} for q in asked]
        turns[0]["content"] = pictures + turns[0]["content"]
        answers = [{"role": "assistant", "content": [{"type": "text", "text": a}]} for _q, a in self.earlier]
        return [m for pair in zip(turns, answers) for m in pair] + turns[-1:]


class Backend(Protocol):
    """Answers a list of items, in order."""

    def answer(self, items: list[Item], max_tokens: int) -> list[str]: ...


class TransformersBackend:
    """AutoModelForImageTextToText and AutoProcessor, batched."""

    def __init__(self, checkpoint: str, batch_size: int = 50, threads: int = 2) -> None:
        import torch
        from transformers import AutoModelForImageTextToText, AutoProcessor

        torch.set_num_threads(threads)
        self.torch, self.batch_size = torch, batch_size
        self.processor = AutoProcessor.from_pretrained(checkpoint)
        self.processor.tokenizer.padding_side = "left"
        self.model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()

    def answer(self, items: list[Item], max_tokens: int) -> list[str]:
        out: list[str] = []
        for i in range(0, len(items), self.batch_size):
            out += self._batch(items[i:i + self.batch_size], max_tokens)
        return out

    def _batch(self, items: list[Item], max_tokens: int) -> list[str]:
        texts = [self.processor.apply_chat_template(item.messages([{"type": "image"} for _ in item.pictures]), add_generation_prompt=True)
                 for item in items]
        pictures = [p for item in items for p in item.pictures]
        inputs = self.processor(text=texts, images=pictures or None, return_tensors="pt", padding=True)
        inputs.pop("token_type_ids", None)
        if pictures:
            inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        with self.torch.no_grad():
            ids = self.model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        new = ids[:, inputs["input_ids"].shape[1]:]
        return [t.strip() for t in self.processor.batch_decode(new, skip_special_tokens=True)]


def data_url(picture: Image.Image) -> str:
    """A picture as a PNG data URL."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


class HttpBackend:
    """POST /v1/chat/completions, several requests at a time."""

    def __init__(self, url: str, model: str | None = None, parallel: int = 8, timeout_s: float = 120) -> None:
        self.url, self.parallel, self.timeout_s = url.rstrip("/"), parallel, timeout_s
        self.model = model or self._get("/v1/models")["data"][0]["id"]

    def answer(self, items: list[Item], max_tokens: int) -> list[str]:
        with ThreadPoolExecutor(self.parallel) as pool:
            return list(pool.map(lambda item: self._ask(item, max_tokens), items))

    def _ask(self, item: Item, max_tokens: int) -> str:
        pictures = [{"type": "image_url", "image_url": {"url": data_url(p)}} for p in item.pictures]
        body = {"model": self.model, "temperature": 0, "max_tokens": max_tokens, "messages": item.messages(pictures)}
        request = urllib.request.Request(f"{self.url}/v1/chat/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=self.timeout_s) as reply:
            return json.load(reply)["choices"][0]["message"]["content"].strip()

    def _get(self, path: str) -> dict:
        with urllib.request.urlopen(self.url + path, timeout=self.timeout_s) as reply:
            return json.load(reply)
