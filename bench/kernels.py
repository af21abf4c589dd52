"""The GPU kernels against the roofline: `python -m bench.kernels [--gpu H100] [--only decode] [--json]`.

For each case the bytes and operations it cannot do without, and the ceiling they set: the longer of bytes / peak
bandwidth and operations / dense bf16 rate. On a machine with a CUDA GPU each case is also measured, and achieved /
ceiling printed; the rate of operations is then what torch's own matmul reaches in the same run, the bandwidth still
the data sheet's.

Measured are replays of a CUDA graph, as the engine decodes: so many calls over different buffers that each finds its
data outside the L2 cache; the median over replays.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch

from services.text_engine.attention.interface import AttentionMetadata, AttentionShape
from services.text_engine.kernels.kv_layout import KVFormat, KVLayout

BLOCK_SIZE = 16
BF16 = torch.bfloat16
COLD_BYTES = 512 << 20  # several L2 caches
MAX_BUFFERS = 64
REPLAYS = 15

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Gpu:
    """Data sheet, without sparsity."""

    name: str
    hbm_bytes_per_s: float
    bf16_flops: float


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100", 2039e9, 312e12),  # SXM, 80 GB
        Gpu("H100", 3350e9, 989e12),  # SXM
        Gpu("H200", 4800e9, 989e12),
        Gpu("B200", 8000e9, 2250e12),
    )
}


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to do.

    parts  (bytes, flops) of its pieces, which the ideal does one after the other
    make   allocates one call's inputs and returns the call
    goal   wanted of the ceiling
    """

    name: str
    parts: tuple[tuple[int, float], ...]
    make: Callable[[torch.device], Call]
    goal: float | None = None

    @property
    def size_bytes(self) -> int:
        return sum(size_bytes for size_bytes, _ in self.parts)

    @property
    def flops(self) -> float:
        return sum(flops for _, flops in self.parts)

    def ceiling_s(self, gpu: Gpu) -> float:
        return sum(max(size_bytes / gpu.hbm_bytes_per_s, flops / gpu.bf16_flops) for size_bytes, flops in self.parts)

    def bound(self, gpu: Gpu) -> str:
        return "memory" if self.size_bytes / gpu.hbm_bytes_per_s >= self.flops / gpu.bf16_flops else "compute"


@dataclass(frozen=True, slots=True)
class Row:
    """`achieved` is ceiling / measured time, None where nothing was measured."""

    case: str
    size_bytes: int
    flops: float
    bound: str
    ceiling_us: float
    measured_us: float | None = None
    achieved: float | None = None
    goal: float | None = None
    error: str | None = None


# --- attention --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Attention:
    """A ragged batch: (new tokens, context including them) of each sequence."""

    sequences: tuple[tuple[int, int], ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    kv_format: KVFormat = "auto"

    @property
    def num_tokens(self) -> int:
        return sum(num_new for num_new, _ in self.sequences)

    def costs(self) -> tuple[int, float]:
        """Reads the cached keys and values, writes the new ones; reads q, k, v, writes the output; both products."""
        layout = KVLayout(self.num_kv_heads, self.head_dim, BLOCK_SIZE, BF16, self.kv_format)
        kv_bytes_per_token = layout.num_kv_heads * layout.head_stride * layout.element_dtype.itemsize / BLOCK_SIZE
        kv_bytes = sum(context + num_new for num_new, context in self.sequences) * kv_bytes_per_token
        head_rows = self.num_tokens * (2 * self.num_heads + 2 * self.num_kv_heads)
        visible = sum(num_new * (2 * context - num_new + 1) / 2 for num_new, context in self.sequences)
        flops = 4 * self.num_heads * self.head_dim * visible
        return int(kv_bytes + head_rows * self.head_dim * BF16.itemsize), flops

    def make(self, device: torch.device) -> Call:
        from services.text_engine.attention.triton_backend import TritonAttention  # late: needs Triton

        shape = AttentionShape(self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim**-0.5)
        attention = TritonAttention(
            BF16, device, max_num_seqs=max(64, len(self.sequences)), kv_cache_format=self.kv_format
        )
        contexts = [context for _, context in self.sequences]
        max_blocks = -(-max(contexts) // BLOCK_SIZE)
        kv_cache = attention.allocate_kv_cache(max_blocks * len(contexts), BLOCK_SIZE, shape)
        if self.kv_format == "auto":
            kv_cache.normal_()
        # Every sequence's blocks lie scattered over the whole cache.
        tables = torch.randperm(max_blocks * len(contexts), dtype=torch.int32).view(len(contexts), max_blocks)
        slots = []
        for table, (num_new, context) in zip(tables.long(), self.sequences, strict=True):
            positions = torch.arange(context - num_new, context)
            slots.append(table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE)
        new_tokens = torch.tensor([0, *(num_new for num_new, _ in self.sequences)])
        metadata = AttentionMetadata(
            cu_seqlens_q=new_tokens.cumsum(0).to(device, torch.int32),
            seq_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
            block_tables=tables.to(device),
            slot_mapping=torch.cat(slots).to(device),
        )
        query = torch.randn(self.num_tokens, self.num_heads, self.head_dim, device=device, dtype=BF16)
        key, value = torch.randn(2, self.num_tokens, self.num_kv_heads, self.head_dim, device=device, dtype=BF16)
        half = torch.ones(self.num_tokens, self.head_dim // 2, device=device)
        cos_sin = torch.cat((half, torch.zeros_like(half)), 1)
        return lambda: attention.attend(query, key, value, cos_sin, kv_cache, metadata, shape)


def attention_cases() -> Iterator[Case]:
    def case(name: str, attention: Attention, goal: float | None) -> Case:
        return Case(name, (attention.costs(),), attention.make, goal)

    for context in (2048, 8192, 32768):
        many = Attention(((1, context),) * 33)
        yield case(f"decode 33 x {context}, GQA 32/8", many, 0.85 if context >= 8192 else 0.80)
    for context in (4096, 8192, 16384, 32768):
        one = Attention(((1, context),))
        yield case(f"decode 1 x {context}, GQA 32/8", one, 0.60 if context == 4096 else None)
    for num_seqs in (8, 16, 32, 64):
        many = Attention(((1, 1024),) * num_seqs, num_kv_heads=32)
        yield case(f"decode {num_seqs} x 1024, MHA 32/32", many, 0.80 if num_seqs * 32 >= 264 else None)
    for context in (2048, 8192):
        fp8 = Attention(((1, context),) * 33, kv_format="fp8")
        yield case(f"decode 33 x {context}, GQA 32/8, fp8 cache", fp8, None)
    fp8 = Attention(((1, 1024),) * 64, num_kv_heads=32, kv_format="fp8")
    yield case("decode 64 x 1024, MHA 32/32, fp8 cache", fp8, None)
    for context in (2048, 4096, 8192):
        yield case(f"prefill {context}, GQA 32/8", Attention(((context, context),)), 0.60)
    chunk, decodes = (512, 2048), ((1, 2048),) * 64
    mixed = Attention((*decodes, chunk))
    parts = (Attention(decodes).costs(), Attention((chunk,)).costs())
    yield Case("mixed: 64 x 2048 and a chunk of 512 at 2048", parts, mixed.make, 1 / 1.15)


# --- elementwise ------------------------------------------------------------------------------------------------------


def add_rms_norm_case(num_tokens: int, dim: int) -> Case:
    def make(device: torch.device) -> Call:
        from services.text_engine.kernels.rms_norm import add_rms_norm

        x, residual = torch.randn(2, num_tokens, dim, device=device, dtype=BF16)
        weight = torch.ones(dim, device=device, dtype=BF16)
        return lambda: add_rms_norm(x, residual, weight, 1e-6)

    return Case(f"add_rms_norm {num_tokens} x {dim}", ((4 * num_tokens * dim * 2 + 2 * dim, 0.0),), make)


def silu_mul_case(num_tokens: int, intermediate: int) -> Case:
    def make(device: torch.device) -> Call:
        from services.text_engine.kernels.silu_mul import silu_mul

        gate_up = torch.randn(num_tokens, 2 * intermediate, device=device, dtype=BF16)
        return lambda: silu_mul(gate_up)

    return Case(f"silu_mul {num_tokens} x {intermediate}", ((3 * num_tokens * intermediate * 2, 0.0),), make)


def sample_case(num_rows: int, vocab_size: int, *, top_p: float) -> Case:
    def make(device: torch.device) -> Call:
        from services.text_engine.kernels.sample import sample
        from services.text_engine.kernels.sampling_tensors import SamplingTensors

        logits = torch.randn(num_rows, vocab_size, device=device) * 3
        fp32, int32, int64 = (
            torch.ones(num_rows, device=device).to(t) for t in (torch.float32, torch.int32, torch.int64)
        )
        sampling = SamplingTensors(fp32, 0 * int32, top_p * fp32, 0 * fp32, int64, int64, int64)
        return lambda: sample(logits, vocab_size, sampling)

    return Case(f"sample {num_rows} x {vocab_size}, top_p {top_p}", ((num_rows * vocab_size * 4, 0.0),), make)


# --- products ---------------------------------------------------------------------------------------------------------


def product_bytes(num_rows: int, out_features: int, in_features: int) -> int:
    """Of the activations."""
    return 2 * num_rows * (out_features + in_features)


def quant_matmul_case(bits: int, num_rows: int, out_features: int, in_features: int) -> Case:
    def make(device: torch.device) -> Call:
        from services.text_engine.kernels.quant_layout import QuantizedWeight, pack_int4, pack_int8
        from services.text_engine.kernels.quant_matmul import make_arrivals, quant_matmul

        weight: QuantizedWeight
        if bits == 4:
            groups = (in_features // 128, out_features)
            scales = torch.full(groups, 0.01, device=device, dtype=torch.float16)
            zeros = torch.full(groups, 8, device=device, dtype=torch.uint8)
            quants = torch.randint(0, 16, (in_features, out_features), device=device, dtype=torch.uint8)
            weight = pack_int4(quants, scales, zeros, 128)
        else:
            quants = torch.randint(-127, 128, (out_features, in_features), device=device, dtype=torch.int8)
            weight = pack_int8(quants, torch.full((out_features,), 0.01, device=device))
        x = torch.randn(num_rows, in_features, device=device, dtype=BF16)
        arrivals = make_arrivals(device)
        return lambda: quant_matmul(x, weight, None, arrivals)

    group_bytes = 4 * (in_features // 128) * out_features if bits == 4 else 4 * out_features
    size_bytes = (
        bits * in_features * out_features // 8 + group_bytes + product_bytes(num_rows, out_features, in_features)
    )
    name = f"int{bits} matmul {num_rows} x {in_features} x {out_features}"
    return Case(name, ((size_bytes, 2.0 * num_rows * out_features * in_features),), make)


def dense_matmul_case(num_rows: int, out_features: int, in_features: int) -> Case:
    """torch's own, to compare with."""

    def make(device: torch.device) -> Call:
        x = torch.randn(num_rows, in_features, device=device, dtype=BF16)
        weight = torch.randn(out_features, in_features, device=device, dtype=BF16)
        return lambda: torch.nn.functional.linear(x, weight)

    size_bytes = 2 * in_features * out_features + product_bytes(num_rows, out_features, in_features)
    flops = 2.0 * num_rows * out_features * in_features
    return Case(f"torch bf16 matmul {num_rows} x {in_features} x {out_features}", ((size_bytes, flops),), make)


def all_cases() -> list[Case]:
    return [
        *attention_cases(),
        *(add_rms_norm_case(num_tokens, 4096) for num_tokens in (1, 64, 4096)),
        *(silu_mul_case(num_tokens, 14336) for num_tokens in (1, 64, 4096)),
        *(sample_case(num_rows, 128256, top_p=top_p) for num_rows in (1, 64) for top_p in (1.0, 0.9)),
        *(
            quant_matmul_case(bits, num_rows, out_features, 4096)
            for out_features in (4096, 28672)
            for bits in (4, 8)
            for num_rows in (1, 8, 16, 64)
        ),
        *(dense_matmul_case(num_rows, 28672, 4096) for num_rows in (1, 16, 64)),
    ]


# --- measuring --------------------------------------------------------------------------------------------------------


def measure_s(case: Case, device: torch.device) -> float:
    """Seconds of one call: the median over replays of a graph of calls that take turns over cold buffers."""
    num_buffers = max(1, min(COLD_BYTES // case.size_bytes + 1, MAX_BUFFERS))
    calls = [case.make(device) for _ in range(num_buffers)]
    num_calls = max(num_buffers, 8)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:  # compiles, and fills what is allocated once
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in itertools.islice(itertools.cycle(calls), num_calls):
            call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / num_calls)
    return statistics.median(times)


def measured_matmul_flops(device: torch.device) -> float:
    case = dense_matmul_case(8192, 8192, 8192)
    return case.flops / measure_s(case, device)


def run(case: Case, gpu: Gpu, device: torch.device | None) -> Row:
    ceiling_s = case.ceiling_s(gpu)
    paper = (case.name, case.size_bytes, case.flops, case.bound(gpu), ceiling_s * 1e6)
    if device is None:
        return Row(*paper, goal=case.goal)
    try:
        measured_s = measure_s(case, device)
    except Exception as error:  # noqa: BLE001 - one case that fails must not cost the others' figures
        return Row(*paper, goal=case.goal, error=f"{type(error).__name__}: {error}"[:300])
    finally:
        torch.cuda.empty_cache()
    return Row(*paper, measured_us=measured_s * 1e6, achieved=ceiling_s / measured_s, goal=case.goal)


def format_row(row: Row) -> str:
    line = f"{row.case:46}{row.size_bytes / 1e6:10.2f}{row.flops / 1e9:11.2f}  {row.bound:8}{row.ceiling_us:10.1f}"
    if row.error is not None:
        return f"{line}  failed: {row.error}"
    if row.measured_us is not None and row.achieved is not None:
        line += f"{row.measured_us:10.1f}{row.achieved:10.0%}"
    else:
        line += f"{'-':>10}{'-':>10}"
    return line + (f"{row.goal:8.0%}" if row.goal is not None else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--gpu", choices=sorted(GPUS), help="whose data sheet to use; default: the machine's, else H100's"
    )
    parser.add_argument("--only", metavar="NAME", help="only cases whose name contains this")
    parser.add_argument("--paper", action="store_true", help="measure nothing even where there is a GPU")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    device = torch.device("cuda") if torch.cuda.is_available() and not options.paper else None
    device_name = torch.cuda.get_device_name(device) if device is not None else ""
    gpu = GPUS[options.gpu or next((name for name in GPUS if name in device_name), "H100")]
    head: dict[str, object] = {"gpu": gpu.name, "measured_on": device_name or None, "torch": torch.__version__}
    if device is not None:
        gpu = Gpu(gpu.name, gpu.hbm_bytes_per_s, measured_matmul_flops(device))
    head |= {"hbm_GB_per_s": gpu.hbm_bytes_per_s / 1e9, "bf16_TFLOP_per_s": gpu.bf16_flops / 1e12}
    if options.json:
        print(json.dumps(head))
    else:
        print(", ".join(f"{name} {value}" for name, value in head.items()))
        print(
            "measured" if device is not None else "NOTHING WAS MEASURED: ceilings computed from the data sheet only",
            "\n",
        )
        print(f"{'':46}{'MB':>10}{'GFLOP':>11}  {'bound':8}{'ceiling us':>10}{'us':>10}{'achieved':>10}{'goal':>8}")
    for case in all_cases():
        if not options.only or options.only in case.name:
            row = run(case, gpu, device)
            print(json.dumps(asdict(row)) if options.json else format_row(row), flush=True)


if __name__ == "__main__":
    main()
