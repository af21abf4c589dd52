"""Sampling on the device, interpreted, against the CPU's sampler and against the twin that sorts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.text_engine.core.sequence import Sequence
from services.text_engine.kernels import reference
from services.text_engine.kernels.sample import MAX_CANDIDATES, sample
from services.text_engine.kernels.sampling_tensors import SamplingTensors
from services.text_engine.runner.device_sampling import sampling_tensors as to_sampling_tensors
from services.text_engine.runner.sampler import Sampler
from shared.sampling import SamplingParams

# The hash multiplies modulo 2^64, which numpy mentions when the numbers are single ones.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in scalar:RuntimeWarning")
seeds = st.integers(0, 1000)
examples = settings(max_examples=12, deadline=None, derandomize=True)
transforms = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.1, 0.7, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 2, 5, 40, 3000]),
        "top_p": st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99, 1.0]),
        "min_p": st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    }
)


def random_logits(num_rows: int, vocab_size: int, *, seed: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def sampling_tensors(num_rows: int, *, seed: int = 0, **options: Any) -> SamplingTensors:
    """The same options for every row, or one for each; seeds count up."""

    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        value = torch.as_tensor(options.pop(name, default), dtype=dtype)
        return value.expand(num_rows).contiguous()

    tensors = SamplingTensors(
        temperatures=column("temperature", 1.0, torch.float32),
        top_ks=column("top_k", 0, torch.int32),
        top_ps=column("top_p", 1.0, torch.float32),
        min_ps=column("min_p", 0.0, torch.float32),
        seeds=torch.arange(num_rows) + seed,
        indices=column("index", 0, torch.int64),
        positions=column("position", 0, torch.int64),
    )
    assert not options
    return tensors


@examples
@given(
    vocab_size=st.sampled_from([1, 2, 17, 50, 1023, 1025, 3001]),
    padding=st.sampled_from([0, 1, 64]),
    spread=st.sampled_from([0.3, 3.0]),
    seed=st.integers(-(2**63) + 1, 2**63 - 1),
    index=st.integers(0, 3),
    position=st.integers(0, 5),
    transform=transforms,
)
def test_a_seed_draws_the_cpu_samplers_token(vocab_size, padding, spread, seed, index, position, transform):
    logits = random_logits(1, vocab_size + padding, seed=seed % 1000, spread=spread)
    logits[:, vocab_size:] = 100.0  # padding of the head, never sampled
    sequence = Sequence(
        request_id="r",
        token_ids=[1] * (2 + position),
        num_prompt_tokens=2,
        sampling=SamplingParams(seed=seed, **transform),
        max_total_tokens=100,
        index=index,
    )
    [expected] = Sampler(vocab_size, (), frozenset()).sample(logits.clone(), [sequence])
    tensors = sampling_tensors(1, seed=seed, index=index, position=position, **transform)
    token_ids, is_finite = sample(logits, vocab_size, tensors)
    assert is_finite.all()
    assert token_ids.tolist() == [expected.token_id]


@examples
@given(
    num_rows=st.sampled_from([1, 3]),
    vocab_size=st.sampled_from([17, 50, 1025]),
    num_values=st.sampled_from([1, 2, 7, 300]),
    num_forbidden=st.sampled_from([0, 1, 16]),
    seed=seeds,
    transform=transforms,
)
def test_equal_logits_are_ordered_by_id(num_rows, vocab_size, num_values, num_forbidden, seed, transform):
    """As 16-bit heads make them, zeros of both signs and forbidden tokens among them."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randint(0, num_values, (num_rows, vocab_size), generator=generator) - num_values // 2) / 8
    logits[:, ::3] *= -1
    logits[:, torch.randperm(vocab_size, generator=generator)[:num_forbidden]] = float("-inf")
    tensors = sampling_tensors(num_rows, seed=seed, **transform)
    token_ids, is_finite = sample(logits, vocab_size, tensors)
    expected_ids, _ = reference.sample(logits, vocab_size, tensors)
    assert is_finite.all()
    assert token_ids.tolist() == expected_ids.tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0.95},
        {"top_k": MAX_CANDIDATES + 500},
        {"top_k": 5000, "top_p": 0.9},
        {"temperature": 0.05, "top_k": 200},
    ],
    ids=str,
)
def test_more_tokens_than_can_be_gathered_are_searched_in_place(options):
    logits = random_logits(1, 6007, seed=1, spread=0.05 if "temperature" not in options else 3.0)
    tensors = sampling_tensors(1, **options)
    assert sample(logits, 6007, tensors)[0].tolist() == reference.sample(logits, 6007, tensors)[0].tolist()


def test_rows_with_different_wishes_do_not_disturb_each_other():
    logits = random_logits(6, 501, seed=0)
    options = {
        "temperature": [0.0, 1.0, 0.5, 2.0, 1.0, 1.0],
        "top_k": [0, 0, 5, 0, 40, 1],
        "top_p": [1.0, 1.0, 0.9, 0.5, 1.0, 1.0],
        "min_p": [0.0, 0.1, 0.0, 0.0, 0.3, 0.0],
    }
    together = sample(logits, 501, sampling_tensors(6, **options))[0].tolist()
    for i in range(6):
        alone = sampling_tensors(1, seed=i, **{name: values[i] for name, values in options.items()})
        assert sample(logits[i : i + 1], 501, alone)[0].tolist() == [together[i]]


def test_a_tiny_temperature_takes_the_best_token():
    logits = random_logits(2, 50, seed=0)
    token_ids, is_finite = sample(logits, 50, sampling_tensors(2, temperature=1e-40, top_p=0.9))
    assert is_finite.all()
    assert torch.equal(token_ids, logits.argmax(-1))


def test_rows_that_are_not_finite_say_so_and_leave_the_others_alone():
    logits = random_logits(5, 50, seed=0)
    logits[0, 7] = torch.nan
    logits[1, 7] = torch.inf
    logits[2] = -torch.inf
    logits[3, 1:] = -torch.inf
    for temperature in (0.0, 1.0):
        token_ids, is_finite = sample(logits, 50, sampling_tensors(5, temperature=temperature, top_p=0.9))
        assert is_finite.tolist() == [False, False, False, True, True]
        assert token_ids[:4].tolist() == [0, 0, 0, 0]


def test_a_top_k_beyond_any_vocabulary_means_all_of_it():
    def asking(top_k: int) -> Sequence:
        return Sequence("a", [1, 2], 1, SamplingParams(temperature=1.0, top_k=top_k), max_total_tokens=9)

    tensors = to_sampling_tensors([asking(2**40), asking(0)], [1, 1], torch.device("cpu"))
    token_ids, _ = sample(random_logits(1, 50, seed=1).repeat(2, 1), 50, tensors)
    assert token_ids[0] == token_ids[1]
