"""What a step, an encode and a fetch take, in seconds. A preset says where its figures come from.

A step costs `step_s` whatever is in it, and then for each prompt token its products, for each decoding sequence its row
and its sampling, for each token of context that a decoding row reads its keys and values, and for each pair of a prompt
token and a token before it its share of attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from services.text_engine.core.batch import ScheduledSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """One kind of machine with one kind of model.

    encode_s, encode_image_s   a pass of the vision tower takes the first, and the second for each image in it
    refusal_s                  what an engine does not compute while it refuses a request
    fetch_s                    from the wish for an embedding that exists to its rows in the engine
    num_blocks                 KV blocks of 16 tokens that one engine has
    image_tokens               positions that one picture takes in the prompt
    source                     where the figures come from
    """

    step_s: float
    prompt_token_s: float
    sequence_s: float
    context_token_s: float
    attention_pair_s: float
    encode_s: float
    encode_image_s: float
    max_encode_batch: int
    fetch_s: float
    num_blocks: int
    max_model_len: int
    image_tokens: int
    source: str
    refusal_s: float = 0.0

    def seconds(self, scheduled: Iterable[ScheduledSequence]) -> float:
        """One step that computes these."""
        num_prompt_tokens = num_pairs = num_sequences = num_context_tokens = 0
        for _, start, num_new_tokens, *_ in scheduled:
            if num_new_tokens == 1:
                num_sequences += 1
                num_context_tokens += start
            else:
                num_prompt_tokens += num_new_tokens
                num_pairs += num_new_tokens * (start + num_new_tokens // 2)
        return (
            self.step_s
            + num_prompt_tokens * self.prompt_token_s
            + num_pairs * self.attention_pair_s
            + num_sequences * self.sequence_s
            + num_context_tokens * self.context_token_s
        )

    def decode_step_s(self, num_sequences: int, num_context_tokens: float) -> float:
        """A step in which so many sequences decode, each behind so much context, and nothing else happens."""
        return self.step_s + num_sequences * (self.sequence_s + num_context_tokens * self.context_token_s)

    def request_s(
        self, num_new_tokens: float, num_context_tokens: float, num_output_tokens: float, batch: int
    ) -> float:
        """What one request takes of an engine that decodes `batch` of them together: the basis of `--load`."""
        prefill = num_new_tokens * (self.prompt_token_s + num_context_tokens * self.attention_pair_s)
        row_s = self.step_s / batch + self.sequence_s + num_context_tokens * self.context_token_s
        return prefill + num_output_tokens * row_s


PRESETS: Final = {
    "cpu": CostModel(
        step_s=0.010,
        prompt_token_s=0.000263,
        sequence_s=0.00045,
        context_token_s=5e-7,
        attention_pair_s=1.5e-7,
        encode_s=0.010,
        encode_image_s=0.062,
        max_encode_batch=4,
        fetch_s=0.005,
        num_blocks=5600,
        max_model_len=2048,
        image_tokens=196,
        refusal_s=0.0024,
        source=(
            "SmolLM2-135M in bf16 with all services on 2 Zen 5 cores. Fitted to bench/results/2026-11-30.md: W3 (93 "
            "tokens/s alone), W1 (a 512-token step is the 95th percentile gap of 0.16 to 0.18 s; after the last first "
            "token 32 sequences take 34 ms a step); attention from 466 GF/s and 62 ms an image from docs/log.md; a "
            "refusal from bench/results/overload.md: 46 a second cost 11 % of the answers"
        ),
    ),
    "h100": CostModel(
        step_s=0.0065,
        prompt_token_s=0.000030,
        sequence_s=0.00002,
        context_token_s=4.5e-8,
        attention_pair_s=1.2e-9,
        encode_s=0.004,
        encode_image_s=0.003,
        max_encode_batch=8,
        fetch_s=0.003,
        num_blocks=28_000,
        max_model_len=8192,
        image_tokens=576,
        source=(
            "AN ASSUMPTION, measured by nobody: an 8B model in bf16 on one H100. 16 GB of weights at 2.5 TB/s a step, "
            "16 GFLOP a prompt token at 530 TFLOP/s, 128 kB of keys and values a token at 2.9 TB/s, 448,000 tokens "
            "of KV cache in 58 GB, a ViT-L tower of 576 tokens an image"
        ),
    ),
}
