"""The decoder gives transformers' tokens and logits for every family, however the work is cut up."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from tests.checkpoints import LLAVA_RECIPES, RECIPES
from tests.conftest import CheckpointFactory
from tests.models.oracle import load_oracle, load_ours, oracle_greedy, oracle_logits, prompt_tokens
from tests.models.paged import PagedSequence

NUM_NEW_TOKENS = 24
PROMPT_LENGTHS = (1, 15, 16, 17, 53)


@pytest.mark.parametrize("name", RECIPES)
def test_a_batch_of_odd_lengths_gives_transformers_greedy_tokens(checkpoint: CheckpointFactory, name: str):
    oracle, ours = load_oracle(checkpoint(name)), load_ours(checkpoint(name))
    prompts = [prompt_tokens(length, seed=length) for length in PROMPT_LENGTHS]
    want = [oracle_greedy(oracle, NUM_NEW_TOKENS, input_ids=prompt[None]) for prompt in prompts]
    assert ours.generate(prompts, NUM_NEW_TOKENS) == want


@pytest.mark.parametrize("name", RECIPES)
def test_logits_of_a_long_prompt_are_transformers(checkpoint: CheckpointFactory, name: str):
    tokens = prompt_tokens(200)
    want = oracle_logits(load_oracle(checkpoint(name)), tokens)
    torch.testing.assert_close(load_ours(checkpoint(name)).logits(tokens), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["published", "transformers", "nested"])
@pytest.mark.parametrize("name", LLAVA_RECIPES)
def test_image_rows_in_place_of_placeholders_give_transformers_greedy_tokens(
    checkpoint: CheckpointFactory, name: str, layout: str
):
    folder = checkpoint(name, layout=layout)
    oracle, ours = load_oracle(folder), load_ours(folder)
    image = Image.effect_noise((80, 60), 90).convert("RGB")
    inputs = AutoProcessor.from_pretrained(folder)(text="Look: <image>\nWhat?", images=image, return_tensors="pt")
    prompt = inputs["input_ids"][0]
    hidden = ours.decoder.embed(prompt)
    with torch.inference_mode():
        features = oracle.get_image_features(pixel_values=inputs["pixel_values"]).pooler_output
    hidden[prompt == ours.decoder.config.image_token_id] = torch.cat(list(features))
    assert ours.generate([hidden], NUM_NEW_TOKENS) == [oracle_greedy(oracle, NUM_NEW_TOKENS, **inputs)]


@pytest.mark.parametrize("name", ["llama", "qwen2_window_upper_layers", "mistral", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("chunk_size", [1, 7, 16, 31])
def test_a_prompt_in_chunks_gives_the_logits_of_the_whole(checkpoint: CheckpointFactory, name: str, chunk_size: int):
    ours = load_ours(checkpoint(name))
    tokens = prompt_tokens(75)
    sequence = PagedSequence()
    chunks = [ours.step([(sequence, chunk)])[0] for chunk in tokens.split(chunk_size)]
    torch.testing.assert_close(torch.cat(chunks), ours.logits(tokens), rtol=1e-4, atol=1e-4)


def test_prefill_chunks_and_decodes_share_a_step_without_touching_each_other(checkpoint: CheckpointFactory):
    ours = load_ours(checkpoint("llama"))
    first, second = prompt_tokens(40, seed=1), prompt_tokens(33, seed=2)
    decoding, prefilling = PagedSequence(), PagedSequence()
    ours.step([(decoding, first[:39])])
    decoded, part = ours.step([(decoding, first[39:]), (prefilling, second[:20])])
    [rest] = ours.step([(prefilling, second[20:])])
    torch.testing.assert_close(decoded, ours.logits(first)[39:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.cat((part, rest)), ours.logits(second), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen2", "llava_clip_llama"])
def test_shards_give_the_same_bits_as_one_file(checkpoint: CheckpointFactory, name: str):
    tokens = prompt_tokens(20)
    sharded = checkpoint(name, max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert torch.equal(load_ours(sharded).logits(tokens), load_ours(checkpoint(name)).logits(tokens))


@pytest.mark.parametrize("name", ["mistral", "qwen2_window_upper_layers"])
@pytest.mark.parametrize("position", [31, 32, 33, 34, 99])
def test_a_sliding_window_ends_exactly_where_transformers_ends_it(
    checkpoint: CheckpointFactory, name: str, position: int
):
    """Case D29."""
    tokens = prompt_tokens(100)
    want = oracle_logits(load_oracle(checkpoint(name)), tokens)[position]
    ours = load_ours(checkpoint(name))
    torch.testing.assert_close(ours.logits(tokens)[position], want, rtol=1e-4, atol=1e-4)


def test_a_window_of_32_sees_31_tokens_back_and_no_further(checkpoint: CheckpointFactory):
    ours = load_ours(checkpoint("mistral_one_layer"))  # every further layer would let a token look 31 back again
    tokens = prompt_tokens(34)
    changed = tokens.clone()
    changed[1] = tokens[1] + 1
    differs = (ours.logits(tokens) != ours.logits(changed)).any(-1)
    assert differs.nonzero().flatten().tolist() == list(range(1, 33))


@pytest.mark.parametrize("name", ["llama", "qwen2_tied", "qwen3", "gemma3_text"])
def test_bf16_logits_are_as_near_to_fp32_as_transformers_own(checkpoint: CheckpointFactory, name: str):
    folder, tokens = checkpoint(name), prompt_tokens(100)
    exact = oracle_logits(load_oracle(folder), tokens)
    our_error = (load_ours(folder, torch.bfloat16).logits(tokens) - exact).square().mean().sqrt()
    oracle_error = (oracle_logits(load_oracle(folder, torch.bfloat16), tokens) - exact).square().mean().sqrt()
    assert our_error < 0.06 * exact.std()
    assert our_error < 1.1 * oracle_error
