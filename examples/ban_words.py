"""A logits processor: words that an answer must not use, given by each request.

    PYTHONPATH=examples diptych serve --logits-processors ban_words:BanWords
    curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' -d '{
        "messages": [{"role": "user", "content": "Hello!"}], "vllm_xargs": {"ban_words": ["picture", "red"]}}'

`python examples/ban_words.py` does the same without a server.
"""

from collections.abc import Sequence
from typing import Any

import torch

from services.text_engine.runner.logits_processors import Adjust, Vocabulary


class BanWords:
    name = "ban_words"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def for_request(self, arguments: Any, prompt_token_ids: Sequence[int]) -> Adjust | None:
        if arguments is None:
            return None
        if not isinstance(arguments, list) or not all(isinstance(word, str) and word for word in arguments):
            raise ValueError("give a list of words")
        # A word has other tokens at the beginning of a text than after a space.
        spellings = [spelling for word in arguments for spelling in (word, f" {word}")]
        phrases = [ids for ids in map(self._vocabulary.encode, spellings) if ids]

        def adjust(generated: Sequence[int], logits: torch.Tensor) -> None:
            for *before, last in phrases:
                if list(generated[len(generated) - len(before) :]) == before:
                    logits[last] = float("-inf")

        return adjust


if __name__ == "__main__":
    from diptych import LLM, SamplingParams

    llm = LLM("demo", logits_processors=("ban_words:BanWords",))
    for banned in ([], ["picture"]):
        sampling = SamplingParams(temperature=0, max_tokens=24, extra_args={"ban_words": banned})
        [output] = llm.chat([[{"role": "user", "content": "Hello!"}]], sampling)
        print(f"without {banned}: {output.text}")
