"""What storing embeddings as int8 changes: bytes in the cache, and the logits of the next token.

  python -m bench.embedding_storage [MODEL] [--pictures FOLDER]

Every picture is asked about in several ways; the logits after each question are computed from the exact rows and from
the stored ones, and from rows rounded to bfloat16 for comparison.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass, field
from pathlib import Path

import torch

from diptych import LLM
from diptych.models import resolve
from services.text_engine.attention.torch_reference import TorchReferenceAttention
from services.text_engine.kernels import reference
from services.text_engine.models.load_config import load_model_config
from services.text_engine.models.weights import load_decoder
from services.text_engine.prompt import Prompt
from shared.row_codec import dequantize_rows, quantize_rows
from shared.torch_io import tensor_to_blob
from shared.wire.engine import ChatMessage, ImagePart, TextPart
from tests.models.paged import PagedDecoder

SAMPLES = Path(__file__).resolve().parents[1] / "models" / "demo" / "samples"
QUESTIONS = (
    "What is in the picture?",
    "Describe the image.",
    "How many objects are there?",
    "Is there a dog?",
    "Read it.",
)


@dataclass(slots=True)
class Change:
    """Over all questions: KL divergence in nats, largest change of a logit, whether the best token stayed."""

    divergences: list[float] = field(default_factory=list)
    changes: list[float] = field(default_factory=list)
    agreements: list[bool] = field(default_factory=list)

    def add(self, exact: torch.Tensor, other: torch.Tensor) -> None:
        """Logits [vocab_size] of the next token."""
        exact_log, other_log = exact.log_softmax(-1), other.log_softmax(-1)
        self.divergences.append(float((exact_log.exp() * (exact_log - other_log)).sum()))
        self.changes.append(float((exact - other).abs().max() / exact.std()))
        self.agreements.append(bool(exact.argmax() == other.argmax()))

    def __str__(self) -> str:
        count = len(self.agreements)
        return (
            f"mean KL {sum(self.divergences) / count:.1e} nats, largest {max(self.divergences):.1e}; "
            f"a logit moves by at most {max(self.changes):.3f} standard deviations; "
            f"the best token stays in {sum(self.agreements)} of {count}"
        )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model", nargs="?", default="demo")
    options.add_argument("--pictures", type=Path, default=SAMPLES)
    given = options.parse_args()
    folder = resolve(given.model, say=print).folder
    llm = LLM(folder, dtype="float32")
    changes = {"int8": Change(), "bfloat16": Change()}
    sizes: dict[str, int] = {}
    pictures = sorted(given.pictures.glob("*.png"))
    for picture, question in itertools.product(pictures, QUESTIONS):
        prompt, rows = prepared(llm, picture.read_bytes(), question)
        stored = quantize_rows(rows)
        sizes = {
            name: len(tensor_to_blob(tensor))
            for name, tensor in (("float32", rows), ("bfloat16", rows.bfloat16()), ("int8", stored))
        }
        model = load(folder)  # with an empty cache
        exact = next_logits(model, prompt, rows)
        changes["int8"].add(exact, next_logits(model, prompt, dequantize_rows(stored)))
        changes["bfloat16"].add(exact, next_logits(model, prompt, rows.bfloat16().float()))
    print(f"{len(pictures)} pictures, {len(QUESTIONS)} questions about each, model {given.model} in fp32")
    print("bytes per picture:", ", ".join(f"{name} {size}" for name, size in sizes.items()))
    for name, change in changes.items():
        print(f"{name:9} {change}")


def prepared(llm: LLM, image: bytes, question: str) -> tuple[Prompt, torch.Tensor]:
    encoder = llm._encoder
    assert encoder is not None
    message = ChatMessage(role="user", content=[ImagePart(image=encoder.reference(image)), TextPart(text=question)])
    [rows] = encoder.encode([encoder.prepare(image)])
    return llm._built.prompts.from_messages([message]), rows.float()


@torch.inference_mode()
def next_logits(model: PagedDecoder, prompt: Prompt, rows: torch.Tensor) -> torch.Tensor:
    """[vocab_size], after the whole prompt."""
    hidden = model.decoder.embed(torch.tensor(prompt.token_ids))
    for span in prompt.images:
        hidden[span.start : span.end] = rows[span.rows(span.start, span.end)]
    return model.logits(hidden)[-1]


def load(folder: Path) -> PagedDecoder:
    cpu = torch.device("cpu")
    attention = TorchReferenceAttention(torch.float32, cpu)
    config = load_model_config(folder)
    decoder = load_decoder(folder, config, attention, reference, dtype=torch.float32, device=cpu)
    return PagedDecoder(decoder, attention)


if __name__ == "__main__":
    main()
