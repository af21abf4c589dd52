"""What LoRA adapters cost: `python -m bench.lora [MODEL] [--rank 16] [--sequences 16]`.

Tokens a second of an engine that decodes so many sequences at once: of the model itself in an engine that knows no
adapters, of the model itself beside loaded adapters that no request names, of one adapter, and of four in one batch.
Adapters have random weights for every attention and MLP projection. All lines take turns, so that what else the machine
does meets them alike; each figure is the median of its rounds, with its ratio to the first line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from diptych.models import resolve
from services.text_engine.build import build_engine
from services.text_engine.config import TextEngineSettings
from services.text_engine.engine import Engine
from services.text_engine.engine_io import EngineRequest, TokenOutput
from services.text_engine.models.load_config import load_model_config
from services.text_engine.models.lora.adapter_files import ADAPTABLE
from services.text_engine.models.weights import parameter_shapes
from shared.sampling import SamplingParams

NUM_PROMPT_TOKENS, NUM_WARM_TOKENS = 32, 4
NAMES = ("a", "b", "c", "d")


def write_adapter(model: Path, folder: Path, rank: int, seed: int) -> Path:
    """In PEFT's format, under our names for the matrices, which every family takes."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in parameter_shapes(load_model_config(model)).items():
        if ADAPTABLE.fullmatch(name):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = 0.01 * torch.randn(rank, shape[1], generator=generator)
            tensors[f"{module}.lora_B.weight"] = 0.01 * torch.randn(shape[0], rank, generator=generator)
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def rate(engine: Engine, adapters: list[str | None], num_tokens: int) -> float:
    """Tokens a second once all sequences decode; their prompts differ, so that no cache helps."""
    for index, adapter in enumerate(adapters):
        sampling = SamplingParams(temperature=0.0, max_tokens=NUM_WARM_TOKENS + num_tokens, ignore_eos=True)
        prompt = [3 + (7 * index + 13 * position) % 200 for position in range(NUM_PROMPT_TOKENS)]
        engine.add(EngineRequest(request_id=str(index), token_ids=prompt, sampling=sampling, adapter=adapter))
    begun: set[str] = set()
    while len(begun) < len(adapters):
        begun |= {output.request_id for output in engine.step() or [] if isinstance(output, TokenOutput)}
    num_made, started = 0, time.perf_counter()
    while engine.num_requests:
        num_made += sum(isinstance(output, TokenOutput) for output in engine.step() or [])
    return num_made / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo", metavar="MODEL")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    model = resolve(options.model, say=print).folder
    with tempfile.TemporaryDirectory() as folder:
        written = [write_adapter(model, Path(folder, name), options.rank, seed) for seed, name in enumerate(NAMES)]
        modules = tuple(f"{path.name}={path}" for path in written)

        def engine(modules: tuple[str, ...]) -> Engine:
            settings = TextEngineSettings(
                model=model,
                lora_modules=modules,
                max_lora_rank=options.rank,
                max_num_seqs=options.sequences,
                speculative="off",
                enable_prefix_caching=False,
                kv_cache_memory="1GiB",
            )
            return build_engine(settings, lambda ref: None).engine

        plain, adapted = engine(()), engine(modules)
    count = options.sequences
    lines: dict[str, tuple[Engine, list[str | None]]] = {
        "no adapters": (plain, [None] * count),
        "loaded, none named": (adapted, [None] * count),
        "one": (adapted, ["a"] * count),
        "half of the rows": (adapted, [None if index % 2 else "a" for index in range(count)]),
        "four in a batch": (adapted, [NAMES[index % len(NAMES)] for index in range(count)]),
    }
    rates: dict[str, list[float]] = {name: [] for name in lines}
    for _ in range(options.rounds):
        for name, (driven, adapters) in lines.items():
            rates[name].append(rate(driven, adapters, options.tokens))
    print(f"{model.name}, rank {options.rank}, {count} sequences, {torch.get_num_threads()} threads")
    first = statistics.median(rates["no adapters"])
    for name, found in rates.items():
        median = statistics.median(found)
        print(f"{name:24}{median:10.1f} tokens/s{median / first:8.2f}x")


if __name__ == "__main__":
    main()
