"""Speed of `PackedLinear` beside torch's own: `python -m bench.matmul_cpu [--threads N] [--fp32 | --widened]`.

One line per number of rows: all projections of a model's layers, as a step of that many tokens multiplies them. torch
runs oneDNN on weights prepacked for it in bf16, `linear` in fp32. With --widened ours keep bf16 weights for products in
fp32, torch's are fp32. Both sides alternate in one process, and the weights
together are larger than the caches, as a model's are.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch.nn import functional

from bench.attention_cpu import alternate, machine_limits
from services.text_engine.kernels.native_library import load_native
from services.text_engine.kernels.native_matmul import PackedLinear
from shared.device import has_bfloat16

# (outputs, inputs) of qkv, o, gate_up and down, and how many layers of them
MODELS = {
    "SmolLM2-135M": ([(960, 576), (576, 576), (3072, 576), (576, 1536)], 30),
    "7B": ([(12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008)], 1),
}
NUM_ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 1024)
Linear = Callable[[torch.Tensor], torch.Tensor]


def torch_linear(weight: torch.Tensor) -> Linear:
    if weight.dtype == torch.float32 or not has_bfloat16(weight.device):
        return lambda x: functional.linear(x, weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 32)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def multiply_all(linears: list[tuple[Linear, int]], num_rows: int, dtype: torch.dtype) -> Callable[[], None]:
    inputs = {in_features: torch.randn(num_rows, in_features).to(dtype) for _, in_features in linears}

    def run() -> None:
        for linear, in_features in linears:
            linear(inputs[in_features])

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    dtypes = parser.add_mutually_exclusive_group()
    dtypes.add_argument("--fp32", action="store_true", help="instead of bf16")
    dtypes.add_argument("--widened", action="store_true", help="bf16 weights, products in fp32")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = torch.float32 if options.fp32 or options.widened else torch.bfloat16
    library = load_native()
    if library is None:
        parser.exit(1)
    read_gbps, matmul_gflops = machine_limits(dtype)
    print(f"{options.threads} threads, {dtype}, {library.instruction_set}")
    print(f"limits: read {read_gbps:.0f} GB/s, torch's 1024 x 1024 x 1024 product {matmul_gflops:.0f} GFLOP/s")
    for name, (sizes, num_layers) in MODELS.items():
        weights = [torch.randn(size).to(dtype) for size in sizes for _ in range(num_layers)]
        kept = [weight.bfloat16() for weight in weights] if options.widened else weights
        ours = [(PackedLinear(library, weight, dtype=dtype), weight.shape[1]) for weight in kept]
        theirs = [(torch_linear(weight), weight.shape[1]) for weight in weights]
        num_bytes, num_weights = sum(w.nbytes for w in weights), sum(w.numel() for w in weights)
        print(f"\n{name:20}ours{'':25}torch")
        with torch.inference_mode():
            for num_rows in NUM_ROWS:
                calls = [multiply_all(linears, num_rows, dtype) for linears in (ours, theirs)]
                ours_s, torch_s = alternate(*calls)
                gflops = [2 * num_weights * num_rows / seconds / 1e9 for seconds in (ours_s, torch_s)]
                print(
                    f"{num_rows:5} rows{ours_s * 1e3:10.2f} ms{num_bytes / ours_s / 1e9:6.0f} GB/s{gflops[0]:7.0f} GF/s"
                    f"{torch_s * 1e3:10.2f} ms{gflops[1]:7.0f} GF/s{torch_s / ours_s:7.2f}x"
                )


if __name__ == "__main__":
    main()
