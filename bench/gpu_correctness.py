"""Every GPU kernel, and the engine with CUDA graphs, against plain PyTorch on the same device: a JSON line a case.

`python -m bench.gpu_correctness [--tiny]`; a part of bench/gpu_check.py. A case that fails is reported with what it
found, and the next one runs. What the kernels' tests check in Triton's interpreter is checked here on the hardware, at
the sizes that models have.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.random_llava import TINY, Shape, write_checkpoint
from services.text_engine.attention.interface import AttentionMetadata, AttentionShape
from services.text_engine.attention.torch_reference import TorchReferenceAttention
from services.text_engine.attention.triton_backend import TritonAttention
from services.text_engine.kernels import merge_rows as merge_rows_kernel
from services.text_engine.kernels import quant_layout, quant_matmul, reference
from services.text_engine.kernels.kv_layout import KVFormat
from services.text_engine.kernels.sample import sample
from services.text_engine.kernels.sampling_tensors import SamplingTensors
from services.text_engine.kernels.triton_kernels import TritonKernels
from shared.log import configure_logging

BLOCK_SIZE = 16
SMALL_ENGINE = Shape(512, 1376, 4, 8, 2, 4096, image_rows=64)


@dataclass(frozen=True, slots=True)
class Case:
    """run returns the largest error found, in units of what is allowed: at most 1 is well."""

    name: str
    run: Callable[[], float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a few tiny cases, for Triton's interpreter")
    options = parser.parse_args()
    configure_logging("bench", "warning")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    num_bad = 0
    with torch.inference_mode():
        for case in all_cases(device, is_tiny=options.tiny):
            result: dict[str, object] = {"case": case.name}
            try:
                worst = case.run()
                result |= {"error_over_allowed": round(worst, 3)}
                if not worst <= 1:
                    result["error"] = "more than what is allowed"
            except Exception as error:  # noqa: BLE001 - the next case may tell more
                traceback.print_exc()
                result["error"] = f"{type(error).__name__}: {error}"[:500]
            num_bad += "error" in result
            print(json.dumps(result), flush=True)
    return 1 if num_bad else 0


def all_cases(device: torch.device, *, is_tiny: bool) -> Iterator[Case]:
    yield from elementwise_cases(device, dim=64 if is_tiny else 4096)
    yield from quantized_cases(device, size=128 if is_tiny else 4096)
    yield Case("sample", lambda: sampling_error(device, vocab_size=300 if is_tiny else 32064))
    yield from attention_cases(device, is_tiny=is_tiny)
    yield from engine_cases(device, is_tiny=is_tiny)


def half_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """Triton's interpreter computes bf16 wrongly unless mended as tests/kernels does."""
    return (torch.bfloat16, torch.float16) if device.type == "cuda" else (torch.float16,)


def excess(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> float:
    """The largest |actual - expected| over tolerance * (1 + |expected|); NaN counts as infinite."""
    error = (actual.float() - expected.float()).abs() / (tolerance * (1 + expected.float().abs()))
    return float(error.nan_to_num(float("inf")).max()) if error.numel() else 0.0


# --- elementwise, products, sampling ----------------------------------------------------------------------------------


def elementwise_cases(device: torch.device, dim: int) -> Iterator[Case]:
    kernels = TritonKernels()
    for dtype in half_dtypes(device):
        for num_rows in (1, 17, 512):

            def tensor(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
                return torch.randn(*size, device=device, dtype=dtype)

            x, residual, weight, gate_up = (
                tensor(num_rows, dim), tensor(num_rows, dim), tensor(dim), tensor(num_rows, 2 * dim)
            )  # fmt: skip
            rows, index = tensor(num_rows, dim), torch.randperm(num_rows, device=device)
            suffix = f"{str(dtype)[6:]}, {num_rows} x {dim}"

            def norm(x: torch.Tensor = x, weight: torch.Tensor = weight) -> float:
                return excess(kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), 1e-2)

            def add_norm(
                x: torch.Tensor = x, residual: torch.Tensor = residual, weight: torch.Tensor = weight
            ) -> float:
                expected = reference.add_rms_norm(x, residual, weight, 1e-5)
                actual = kernels.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
                return max(excess(a, e, 2e-2) for a, e in zip(actual, expected, strict=True))

            def gate(gate_up: torch.Tensor = gate_up) -> float:
                return max(
                    excess(kernels.silu_mul(gate_up), reference.silu_mul(gate_up), 1e-2),
                    excess(kernels.gelu_tanh_mul(gate_up), reference.gelu_tanh_mul(gate_up), 1e-2),
                )

            def merge(x: torch.Tensor = x, rows: torch.Tensor = rows, index: torch.Tensor = index) -> float:
                order = torch.arange(len(index), device=device)
                actual = merge_rows_kernel.merge_rows(x.clone(), rows, index, order)
                return excess(actual, reference.merge_rows(x, rows, index, order), 1e-6)

            yield Case(f"rms_norm, {suffix}", norm)
            yield Case(f"add_rms_norm, {suffix}", add_norm)
            yield Case(f"gated products, {suffix}", gate)
            yield Case(f"merge_rows, {suffix}", merge)


def quantized_cases(device: torch.device, size: int) -> Iterator[Case]:
    num_groups = size // 64
    int4 = quant_layout.pack_int4(
        torch.randint(0, 16, (size, size), device=device),
        (torch.rand(num_groups, size, device=device) * 0.02 + 0.001).to(torch.float16),
        torch.randint(0, 17, (num_groups, size), device=device),
        64,
    )
    int8 = quant_layout.quantize_int8(torch.randn(size, size, device=device))
    for name, weight in (("int4", int4), ("int8", int8)):
        for num_rows in (1, 17, 65, 300):

            def product(weight: quant_layout.QuantizedWeight = weight, num_rows: int = num_rows) -> float:
                x = torch.randn(num_rows, size, device=device, dtype=half_dtypes(device)[0])
                arrivals = quant_matmul.make_arrivals(device)
                actual = quant_matmul.quant_matmul(x, weight, None, arrivals)
                expected = x.double() @ reference.dequantize(weight).double().t()
                return excess(actual.double() / expected.std(), expected / expected.std(), 2e-2)

            yield Case(f"{name} product, {num_rows} x {size} x {size}", product)


def sampling_error(device: torch.device, vocab_size: int) -> float:
    """Tokens drawn other than by the twin; a draw on the very edge between two tokens may differ."""
    num_rows = 64 if vocab_size > 1000 else 8
    rng = random.Random(0)
    logits = torch.randn(num_rows, vocab_size, device=device) * 3
    tensors = SamplingTensors(
        temperatures=torch.tensor([rng.choice([0.0, 0.5, 1.0, 1.5]) for _ in range(num_rows)], device=device),
        top_ks=torch.tensor([rng.choice([0, 1, 40]) for _ in range(num_rows)], dtype=torch.int32, device=device),
        top_ps=torch.tensor([rng.choice([1.0, 0.9, 0.3]) for _ in range(num_rows)], device=device),
        min_ps=torch.tensor([rng.choice([0.0, 0.05]) for _ in range(num_rows)], device=device),
        seeds=torch.arange(num_rows, device=device),
        indices=torch.zeros(num_rows, dtype=torch.int64, device=device),
        positions=torch.arange(num_rows, device=device),
    )
    actual, is_finite = sample(logits, vocab_size, tensors)
    host = SamplingTensors(*(getattr(tensors, name).cpu() for name in SamplingTensors.__slots__))
    expected, _ = reference.sample(logits.cpu(), vocab_size, host)
    assert bool(is_finite.all())
    return float((actual.cpu() != expected).sum()) / max(1, num_rows // 32)


# --- attention --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ragged:
    """(new tokens, cached tokens) of each sequence."""

    name: str
    lengths: tuple[tuple[int, int], ...]


DECODE = Ragged("decode", ((1, 2047), (1, 0), (1, 15), (1, 16), (1, 4095), (0, 0), (1, 777)))
MIXED = Ragged("mixed", ((1, 1500), (512, 0), (17, 1000), (0, 40), (1, 31), (200, 313)))
PROMPT = Ragged("prompt", ((1500, 0), (129, 128)))
TINY_BATCHES = (Ragged("decode", ((1, 20), (1, 0), (0, 0), (1, 15))), Ragged("mixed", ((1, 17), (20, 0), (3, 16))))
# num_heads, num_kv_heads, head_dim: Vicuna, Llama 3, Qwen2-0.5B, Phi-2's and others' odd heads, Gemma 3
SHAPES = ((32, 32, 128), (32, 8, 128), (14, 2, 64), (32, 32, 80), (16, 16, 96), (8, 4, 256))


def attention_cases(device: torch.device, *, is_tiny: bool) -> Iterator[Case]:
    batches = TINY_BATCHES if is_tiny else (DECODE, MIXED, PROMPT)
    shapes = ((4, 2, 16),) if is_tiny else SHAPES
    window = 8 if is_tiny else 256
    for heads, kv_heads, head_dim in shapes:
        for batch in batches:
            name = f"attention {batch.name}, {heads}/{kv_heads} heads of {head_dim}"
            plain = AttentionShape(heads, kv_heads, head_dim, head_dim**-0.5)
            yield Case(name, attention_error(device, plain, batch, "auto", 2e-2))
    for label, shape, kv_format, tolerance, has_image in variants(shapes[0], window):
        for batch in batches:
            name = f"attention {batch.name}, {label}"
            yield Case(name, attention_error(device, shape, batch, kv_format, tolerance, has_image=has_image))


def variants(shape: tuple[int, int, int], window: int) -> Iterator[tuple[str, AttentionShape, KVFormat, float, bool]]:
    heads, kv_heads, head_dim = shape
    scale = head_dim**-0.5
    plain = AttentionShape(heads, kv_heads, head_dim, scale)
    yield "sliding window", AttentionShape(heads, kv_heads, head_dim, scale, window), "auto", 2e-2, False
    yield "soft cap", AttentionShape(heads, kv_heads, head_dim, scale, None, 30.0), "auto", 2e-2, False
    yield "an image that sees itself", plain, "auto", 2e-2, True
    yield "fp8 cache", plain, "fp8", 1.5e-1, False
    yield "int8 cache", plain, "int8", 5e-2, False


def attention_error(
    device: torch.device,
    shape: AttentionShape,
    batch: Ragged,
    kv_format: KVFormat,
    tolerance: float,
    *,
    has_image: bool = False,
) -> Callable[[], float]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def run() -> float:
        num_seqs = len(batch.lengths)
        backends = (
            TorchReferenceAttention(dtype, device),
            TritonAttention(dtype, device, max_num_seqs=num_seqs, kv_cache_format=kv_format),
        )
        num_blocks = sum(-(-(new + cached) // BLOCK_SIZE) for new, cached in batch.lengths) + 3
        free = torch.randperm(num_blocks).tolist()
        tables = [[free.pop() for _ in range(-(-(new + cached) // BLOCK_SIZE))] for new, cached in batch.lengths]
        caches = [backend.allocate_kv_cache(num_blocks, BLOCK_SIZE, shape) for backend in backends]
        worst = 0.0
        # First what is cached, then the batch itself; both steps are compared.
        for step in ([(cached, 0) for _, cached in batch.lengths], list(batch.lengths)):
            num_tokens = sum(new for new, _ in step)
            if num_tokens == 0:
                continue
            metadata = make_metadata(step, tables, device, has_image=has_image)
            inputs = [
                torch.randn(num_tokens, heads, shape.head_dim, device=device, dtype=dtype)
                for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
            ]
            angles = torch.rand(num_tokens, shape.head_dim // 2, device=device) * 6
            cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
            expected, actual = (
                backend.attend(*[each.clone() for each in inputs], cos_sin, cache, metadata, shape)
                for backend, cache in zip(backends, caches, strict=True)
            )
            worst = max(worst, excess(actual, expected, tolerance))
        return worst

    return run


def make_metadata(
    step: list[tuple[int, int]], tables: list[list[int]], device: torch.device, *, has_image: bool
) -> AttentionMetadata:
    """has_image: the second quarter of each sequence's new tokens see each other."""
    slots, spans, starts = [], [], [0]
    for (num_new, start), table in zip(step, tables, strict=True):
        starts.append(starts[-1] + num_new)
        first, last = start + num_new // 4, start + num_new // 2
        for position in range(start, start + num_new):
            slots.append(table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
            spans.append((first, last) if first <= position < last else (0, 0))
    width = max(1, max(map(len, tables)))
    padded = [table + [0] * (width - len(table)) for table in tables]
    return AttentionMetadata(
        cu_seqlens_q=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor([new + cached for new, cached in step], dtype=torch.int32, device=device),
        block_tables=torch.tensor(padded, dtype=torch.int32, device=device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        image_spans=torch.tensor(spans, dtype=torch.int32, device=device) if has_image else None,
    )


# --- the engine -------------------------------------------------------------------------------------------------------


def engine_cases(device: torch.device, *, is_tiny: bool) -> Iterator[Case]:
    """Greedy tokens with the GPU's kernels, with and without graphs, against the reference backend's."""
    shape = TINY if is_tiny else SMALL_ENGINE
    expected: list[list[int]] = []

    def tokens(backend: str, *, enforce_eager: bool) -> list[list[int]]:
        return engine_tokens(shape, backend, enforce_eager=enforce_eager, is_tiny=is_tiny)

    def error(actual: list[list[int]]) -> float:
        """Answers that are not the reference's. fp32 sums in another order may tip one of them."""
        return sum(a != e for a, e in zip(actual, expected, strict=True)) / max(1, len(actual) // 8)

    def run_reference() -> float:
        expected.extend(tokens("reference", enforce_eager=True))
        return 0.0

    yield Case("engine, reference backend", run_reference)
    yield Case("engine, Triton, no graphs", lambda: error(tokens("triton", enforce_eager=True)))
    if device.type == "cuda":
        yield Case("engine, Triton, CUDA graphs", lambda: error(tokens("triton", enforce_eager=False)))


def engine_tokens(shape: Shape, backend: str, *, enforce_eager: bool, is_tiny: bool) -> list[list[int]]:
    from services.text_engine.build import build_engine
    from services.text_engine.config import TextEngineSettings
    from services.text_engine.engine_io import EngineRequest, RequestFailed, TokenOutput
    from shared.sampling import SamplingParams

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), shape, max_positions=512)
        settings = TextEngineSettings(
            model=Path(folder),
            load_format="dummy",
            dtype="float32",
            attention_backend="triton" if backend == "triton" else "reference",
            enforce_eager=enforce_eager,
            max_num_seqs=4 if is_tiny else 12,
            max_num_batched_tokens=16 if is_tiny else 128,
            kv_cache_memory="8MiB" if is_tiny else "256MiB",
        )
        engine = build_engine(settings, lambda ref: None).engine
    rng = random.Random(0)
    answers: dict[str, list[int]] = {}
    for i in range(2 if is_tiny else 16):
        token_ids = [rng.randrange(300, shape.image_token_id) for _ in range(5 + 3 * i if is_tiny else 20 + 17 * i)]
        sampling = SamplingParams(temperature=0.0, max_tokens=3 if is_tiny else 32, ignore_eos=True)
        engine.add(EngineRequest(request_id=str(i), token_ids=token_ids, sampling=sampling))
        answers[str(i)] = []
    while engine.num_requests:
        for output in engine.step() or []:
            if isinstance(output, RequestFailed):
                raise RuntimeError(output.error.message)
            if isinstance(output, TokenOutput):
                answers[output.request_id] += output.token_ids
    return list(answers.values())


if __name__ == "__main__":
    sys.exit(main())
