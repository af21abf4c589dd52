"""Tokens/s of one program on the same work: `python -m bench.gpu_throughput engine` or another; see gpu_check.

Every request has a prompt of its own, greedy decoding, and exactly so many tokens of answer. Weights are random, which
changes no amount of work. Tokenizing, HTTP and the vision encoder are left out on all sides: the engine is stepped as
its service does, from token ids to text; transformers goes from token ids to token ids.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.random_llava import TINY, VICUNA_7B, Shape, write_checkpoint
from shared.log import configure_logging

STATIC_BATCH = 32
NUM_REQUESTS = 64
NUM_IMAGE_REQUESTS = 32
PROMPT, OUTPUT = 512, 128
IMAGE_PROMPT = 64  # tokens of text around an image
Prompt = list[int]


class Work:
    """What is to be done; tiny: to test this script."""

    def __init__(self, *, is_tiny: bool) -> None:
        self.is_tiny = is_tiny
        self.shape: Shape = TINY if is_tiny else VICUNA_7B
        self.num_requests = 3 if is_tiny else NUM_REQUESTS
        self.num_image_requests = 1 if is_tiny else NUM_IMAGE_REQUESTS
        self.static_batch = 2 if is_tiny else STATIC_BATCH
        self.prompt, self.output = (10, 2) if is_tiny else (PROMPT, OUTPUT)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.float32 if is_tiny else torch.bfloat16

    def prompts(self, count: int, length: int, seed: int) -> list[Prompt]:
        rng = random.Random(seed)
        return [[rng.randrange(300, self.shape.image_token_id) for _ in range(length)] for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=sorted(PROGRAMS))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--kv-cache-dtype", default="auto")
    options = parser.parse_args()
    configure_logging("bench", "info")
    torch.manual_seed(0)
    with torch.inference_mode():
        PROGRAMS[options.program](Work(is_tiny=options.tiny), options)


def report(case: str, work: Work, num_requests: int, num_prompt: int, seconds: float, **more: Any) -> None:
    num_output = num_requests * work.output
    result = {
        "case": case,
        "requests": num_requests,
        "prompt_tokens": num_prompt,
        "output_tokens": work.output,
        "seconds": round(seconds, 3),
        "output_tokens_per_s": round(num_output / seconds, 1),
        "total_tokens_per_s": round((num_output + num_requests * num_prompt) / seconds, 1),
    }
    print(json.dumps(result | more), flush=True)


# --- ours -------------------------------------------------------------------------------------------------------------


def engine(work: Work, options: argparse.Namespace) -> None:
    from services.text_engine.build import build_engine
    from services.text_engine.config import TextEngineSettings

    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), work.shape)
        settings: dict[str, Any] = {
            "attention_backend": "triton",
            "max_num_seqs": work.num_requests,
            "max_num_batched_tokens": 16 if work.is_tiny else 2048,
            "max_model_len": 128 if work.is_tiny else 2048,
            "kv_cache_memory": "4MiB" if work.is_tiny else None,
        }
        wanted: list[Any] = []
        started = time.monotonic()
        built = build_engine(
            TextEngineSettings(
                model=Path(folder),
                load_format="dummy",
                dtype="float32" if work.is_tiny else "bfloat16",
                enforce_eager=options.enforce_eager,
                kv_cache_dtype=options.kv_cache_dtype,
                enable_prefix_caching=False,
                **settings,
            ),
            wanted.append,
        )
    variant = {
        "enforce_eager": options.enforce_eager,
        "kv_cache_dtype": options.kv_cache_dtype,
        "load_seconds": round(time.monotonic() - started, 1),
        "kv_blocks": built.info.num_kv_blocks,
    }
    runs = Runs(built.engine, wanted, work)
    runs.run(work.prompts(2, work.prompt, seed=1), 0)  # compiles what the engine's own warm-up has not
    for name, count in (("text", work.num_requests), (f"text, {work.static_batch} at once", work.static_batch)):
        figures = runs.run(work.prompts(count, work.prompt, seed=2 + count), 0)
        report(name, work, count, work.prompt, **figures, **variant)
    count = work.num_image_requests
    length = work.shape.image_rows + (4 if work.is_tiny else IMAGE_PROMPT)
    figures = runs.run(work.prompts(count, length, seed=3), work.shape.image_rows)
    report("image", work, count, length, **figures, **variant)


class Runs:
    """Batches of requests through one engine."""

    def __init__(self, engine: Any, wanted: list[Any], work: Work) -> None:
        self._engine = engine
        self._wanted = wanted
        self._work = work
        self._ids = itertools.count()

    def run(self, prompts: list[Prompt], image_rows: int) -> dict[str, float]:
        """Seconds for all; seconds to a request's first token, in the middle and at the 99th percentile."""
        images = {self._add(prompt, image_rows): None for prompt in prompts}
        first: dict[str, float] = {}
        num_tokens = 0
        started = time.monotonic()
        while self._engine.num_requests:
            for ref in self._take_wanted():
                self._engine.put_image(ref.image_key, self._rows(ref.num_tokens))
            for output in self._engine.step() or []:
                if (error := getattr(output, "error", None)) is not None:
                    raise RuntimeError(error.message)
                token_ids = getattr(output, "token_ids", None)
                if token_ids is not None:
                    first.setdefault(output.request_id, time.monotonic() - started)
                    num_tokens += len(token_ids)
        seconds = time.monotonic() - started
        assert num_tokens == len(images) * self._work.output, "every answer has its full length"
        times = sorted(first.values())
        return {
            "seconds": seconds,
            "first_token_p50_s": round(times[len(times) // 2], 4),
            "first_token_p99_s": round(times[-max(1, len(times) // 100)], 4),
        }

    def _add(self, prompt: Prompt, image_rows: int) -> str:
        from services.text_engine.core.sequence import ImageSpan
        from services.text_engine.engine_io import EngineRequest
        from shared.sampling import SamplingParams
        from shared.wire.images import ImageRef

        number = next(self._ids)
        spans: tuple[ImageSpan, ...] = ()
        refs: tuple[ImageRef, ...] = ()
        if image_rows:
            key = f"{number:064x}"
            prompt = [*prompt[:2], *[self._work.shape.image_token_id] * image_rows, *prompt[2 + image_rows :]]
            spans = (ImageSpan(key, start=2, num_tokens=image_rows),)
            refs = (ImageRef(image_key=key, num_tokens=image_rows, width=336, height=336, encoder_url="http://none"),)
        sampling = SamplingParams(temperature=0.0, max_tokens=self._work.output, ignore_eos=True)
        request = EngineRequest(
            request_id=str(number), token_ids=prompt, sampling=sampling, images=spans, image_refs=refs
        )
        self._engine.add(request)
        return request.request_id

    def _take_wanted(self) -> list[Any]:
        taken, self._wanted[:] = list(self._wanted), []
        return taken

    def _rows(self, num_rows: int) -> torch.Tensor:
        return torch.randn(num_rows, self._work.shape.hidden_size, dtype=self._work.dtype)


# --- transformers -----------------------------------------------------------------------------------------------------


def transformers_model(work: Work, attention: str) -> Any:
    import transformers

    shape = work.shape
    config = transformers.LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        vocab_size=shape.vocab_size,
        max_position_embeddings=4096,
        attn_implementation=attention,
    )
    with work.device:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=work.dtype).eval()


def generation_config(work: Work) -> Any:
    import transformers

    return transformers.GenerationConfig(
        max_new_tokens=work.output, min_new_tokens=work.output, do_sample=False, pad_token_id=0, eos_token_id=None
    )


def transformers_static(work: Work, _options: argparse.Namespace) -> None:
    model = transformers_model(work, "sdpa")
    config = generation_config(work)

    def generate(prompts: list[Prompt]) -> None:
        ids = torch.tensor(prompts, device=work.device)
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        assert output.shape == (len(prompts), work.prompt + work.output)

    generate(work.prompts(2, work.prompt, seed=1))
    prompts = work.prompts(work.num_requests, work.prompt, seed=2 + work.num_requests)
    started = time.monotonic()
    for i in range(0, len(prompts), work.static_batch):
        generate(prompts[i : i + work.static_batch])
    if work.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.monotonic() - started
    name = f"text, static batches of {work.static_batch}"
    report(name, work, work.num_requests, work.prompt, seconds, attention="sdpa")


def transformers_continuous(work: Work, _options: argparse.Namespace) -> None:
    import transformers

    model = transformers_model(work, "paged|sdpa")
    config = generation_config(work)

    # Its own choices on a GPU; on a CPU it would take all memory there is.
    limits = {"page_size": 16, "num_blocks": 64, "max_batch_tokens": 64} if work.is_tiny else {}
    batching = transformers.ContinuousBatchingConfig(**limits)

    def generate(prompts: list[Prompt]) -> float:
        started = time.monotonic()
        outputs = model.generate_batch(prompts, generation_config=config, continuous_batching_config=batching)
        assert len(outputs) == len(prompts)
        assert all(len(output.generated_tokens) == work.output for output in outputs.values())
        return time.monotonic() - started

    generate(work.prompts(2, work.prompt, seed=1))
    seconds = generate(work.prompts(work.num_requests, work.prompt, seed=2 + work.num_requests))
    report("text, continuous batching", work, work.num_requests, work.prompt, seconds, attention="paged|sdpa")


PROGRAMS: dict[str, Callable[[Work, argparse.Namespace], None]] = {
    "engine": engine,
    "transformers-static": transformers_static,
    "transformers-continuous": transformers_continuous,
}


if __name__ == "__main__":
    main()
