"""What quantized weights cost and gain: `python -m bench.quantization [MODEL] [--with MODEL.gguf ...] [--text FILE]`.

One line for the checkpoint as it is, for it with --quantization int8 and int4, for it with an int8 KV cache, and for
each other MODEL:

    weights      in memory, and what one decoded token reads of them
    perplexity   of a text, in pieces of 512 tokens, and how often the likeliest next token is the first line's
    decode       tokens a second of 1 and of 32 sequences, without server and sampler; all lines take turns, so that
                 what else the machine does meets them alike. Beside it the ratio to the first line.
    prefill      alike, of one prompt of 512 tokens
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from diptych.models import resolve
from services.text_engine.attention.interface import AttentionBackend, AttentionMetadata
from services.text_engine.config import TextEngineSettings
from services.text_engine.models.decoder import Decoder
from services.text_engine.models.load_config import load_model_config
from services.text_engine.models.quantization.on_the_fly import quantizer
from services.text_engine.models.weights import load_decoder
from services.text_engine.runner.loading import choose_parts
from services.text_engine.tokenizer import Tokenizer
from shared.device import choose_dtype
from tests.models.paged import PagedDecoder, PagedSequence

PIECE = 512
CPU = torch.device("cpu")
NUM_CONTEXT, NUM_DECODED = 64, 16
BATCHES = (1, 32)


@dataclass
class Candidate:
    """One line: a decoder, and what was seen of it."""

    name: str
    decoder: Decoder
    attention: AttentionBackend
    rates: dict[str, list[float]] = field(default_factory=dict)
    perplexity: float = math.nan
    choices: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def paged(self) -> PagedDecoder:
        return PagedDecoder(self.decoder, self.attention, num_blocks=32 * 8)

    def rate(self, what: str) -> float:
        """The quickest but for a tenth, as other programs only add to a time."""
        rates = sorted(self.rates[what], reverse=True)
        return rates[len(rates) // 10]


def load(name: str, folder: Path, kind: str | None, kv_cache_dtype: Literal["auto", "int8"] = "auto") -> Candidate:
    settings = TextEngineSettings(model=folder, kv_cache_dtype=kv_cache_dtype)
    dtype = choose_dtype("auto", CPU)
    parts = choose_parts(settings, CPU, dtype)
    decoder = load_decoder(
        folder,
        load_model_config(folder),
        parts.attention,
        parts.kernels,
        dtype=dtype,
        device=CPU,
        make_product=parts.make_product,
        make_quantized=parts.make_quantized,
        matrix_dtypes=parts.matrix_dtypes,
        quantize=None if kind is None else quantizer("int8" if kind == "int8" else "int4", CPU),
    )
    words = [name, kind or "", "int8 KV cache" if kv_cache_dtype == "int8" else ""]
    return Candidate(" ".join(filter(None, words)), decoder, parts.attention)


def num_bytes(owners: Iterable[Any]) -> int:
    """Of all tensors that the objects hold, themselves or in lists, tuples and dicts; each memory once."""
    seen: set[int] = set()
    sizes: dict[int, int] = {}
    pending = list(owners)
    while pending:
        owner = pending.pop()
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        if isinstance(owner, torch.Tensor):
            storage = owner.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        elif isinstance(owner, (list, tuple)):
            pending += owner
        elif isinstance(owner, dict):
            pending += owner.values()
        elif type(owner).__module__.startswith("services."):
            pending += _attributes(owner)
    return sum(sizes.values())


def _attributes(owner: object) -> list[Any]:
    """Of a plain object or one with slots."""
    slots = [name for kind in type(owner).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*getattr(owner, "__dict__", {}).values(), *(getattr(owner, name) for name in slots if hasattr(owner, name))]


def read_text(candidate: Candidate, token_ids: list[int]) -> None:
    total, choices = 0.0, []
    for start in range(0, len(token_ids), PIECE):
        tokens = torch.tensor(token_ids[start : start + PIECE])
        logits = candidate.paged().logits(tokens)
        total += torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="sum").item()
        choices.append(logits[:-1].argmax(-1))
    candidate.choices = torch.cat(choices)
    candidate.perplexity = math.exp(total / len(candidate.choices))


@torch.inference_mode()
def time_decoding(candidate: Candidate, num_sequences: int) -> None:
    paged = candidate.paged()
    # What the cache holds makes no difference to the time: as if there had been a prompt.
    sequences = [PagedSequence(num_computed_tokens=NUM_CONTEXT) for _ in range(num_sequences)]
    start = time.perf_counter()
    for _ in range(NUM_DECODED):
        paged.step([(sequence, torch.tensor([7])) for sequence in sequences])
    rate = NUM_DECODED * num_sequences / (time.perf_counter() - start)
    candidate.rates.setdefault(f"decode {num_sequences}", []).append(rate)


@torch.inference_mode()
def time_prefill(candidate: Candidate) -> None:
    """The layers alone: an engine's step computes the logits of the last position only."""
    decoder = candidate.decoder
    kv_caches = [candidate.attention.allocate_kv_cache(PIECE // 16, 16, shape) for shape in decoder.attention_shapes]
    metadata = AttentionMetadata(
        cu_seqlens_q=torch.tensor([0, PIECE], dtype=torch.int32),
        seq_lens=torch.tensor([PIECE], dtype=torch.int32),
        block_tables=torch.arange(PIECE // 16, dtype=torch.int32)[None],
        slot_mapping=torch.arange(PIECE),
    )
    hidden = decoder.embed(torch.arange(PIECE))
    start = time.perf_counter()
    decoder.forward(hidden, torch.arange(PIECE), kv_caches, metadata)
    candidate.rates.setdefault("prefill", []).append(PIECE / (time.perf_counter() - start))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo", metavar="MODEL")
    parser.add_argument("--with", dest="others", nargs="*", default=[], metavar="MODEL", help="compared as they are")
    parser.add_argument("--text", type=Path, nargs="*", default=sorted(Path("docs").glob("*.md")), metavar="FILE")
    parser.add_argument("--tokens", type=int, default=4096, help="of the text")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = resolve(options.model, say=print).folder
    others = [resolve(name, say=print) for name in options.others]
    candidates = [load(options.model, folder, kind) for kind in (None, "int8", "int4")]
    candidates.append(load(options.model, folder, None, kv_cache_dtype="int8"))
    candidates += [load(other.name, other.folder, None) for other in others]

    text = "\n".join(path.read_text() for path in options.text)
    token_ids = Tokenizer.load(folder).encode(text, add_special_tokens=False)[: options.tokens]
    for candidate in candidates:
        read_text(candidate, token_ids)
    for _ in range(options.rounds):
        for candidate in candidates:
            for num_sequences in BATCHES:
                time_decoding(candidate, num_sequences)
            time_prefill(candidate)

    first = candidates[0]
    speeds = [*(f"decode {count}" for count in BATCHES), "prefill"]
    print(f"{options.threads} threads, {len(token_ids)} tokens of text")
    print(f"{'':32}{'weights':>10}{'a token':>10}{'perplexity':>12}{'agrees':>9}" + "".join(f"{s:>18}" for s in speeds))
    for candidate in candidates:
        agrees = (candidate.choices == first.choices).float().mean().item()
        read = num_bytes([candidate.decoder._layers, candidate.decoder._lm_head])
        line = f"{candidate.name[-31:]:32}{num_bytes([candidate.decoder]) / 1e6:7.1f} MB{read / 1e6:7.1f} MB"
        line += f"{candidate.perplexity:12.3f}{agrees:9.1%}"
        for speed in speeds:
            line += f"{candidate.rate(speed):9.0f}/s{candidate.rate(speed) / first.rate(speed):6.2f}x"
        print(line)


if __name__ == "__main__":
    main()
