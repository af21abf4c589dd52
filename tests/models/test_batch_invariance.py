"""With the compiled CPU kernels a token's logits are the same bit for bit however the computation was cut."""

from __future__ import annotations

import random

import pytest
import torch

from tests.conftest import CheckpointFactory
from tests.engines import EngineDriver


def logprobs_of(driver: EngineDriver, name: str) -> list[float]:
    recorded: list[float] = []
    publish = driver.engine._token_output

    def record(choice, sampled, finish):  # type: ignore[no-untyped-def]
        if choice.sequence.request_id == name:
            recorded.append(sampled.logprobs.logprob)
        return publish(choice, sampled, finish)

    driver.engine._token_output = record  # type: ignore[method-assign]
    driver.run()
    return recorded


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_logprobs_are_equal_bit_for_bit_alone_batched_chunked_and_cached(checkpoint: CheckpointFactory, dtype: str):
    rng = random.Random(5)
    prompt = [rng.randrange(3, 300) for _ in range(101)]
    results = []
    for budget, num_others, repeats in ((2048, 0, 1), (16, 0, 1), (64, 9, 1), (512, 0, 2)):
        driver = EngineDriver(
            checkpoint("llama"),
            attention_backend="cpu",
            dtype=dtype,
            max_num_batched_tokens=budget,
            max_num_seqs=16,
        )
        for i in range(num_others):
            driver.add(f"other-{i}", prompt[i : 20 + 3 * i], max_tokens=20)
        for _ in range(repeats - 1):
            driver.generate(prompt, max_tokens=4)
        driver.add("r", prompt, max_tokens=12, logprobs=0)
        results.append(logprobs_of(driver, "r"))
    assert all(result == results[0] for result in results)
    assert len(results[0]) == 12
    assert torch.isfinite(torch.tensor(results[0])).all()
