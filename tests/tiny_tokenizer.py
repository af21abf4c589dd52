"""A real tokenizer of a few hundred entries: byte-level BPE with ChatML marks, `<image>`, and a chat template.

Byte-level, so that every text round-trips; trained on the spot from the sentences below, so that no file is stored.
"""

from __future__ import annotations

from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT: Final = "<|endoftext|>"
MESSAGE_START: Final = "<|im_start|>"
MESSAGE_END: Final = "<|im_end|>"
IMAGE_TOKEN: Final = "<image>"

NUM_BASE_TOKENS: Final = 3 + 256 + 57  # special tokens, bytes, merges; `<image>` comes after them

SENTENCES: Final = (
    "The quick brown fox jumps over the lazy dog while the cat looks at the picture.",
    "What is shown in the image? Describe the colours and the shapes that you can see.",
    "There are three red circles and two blue squares on a white background.",
    "You are a helpful assistant. Answer the question of the user in one sentence.",
    "system user assistant 0123456789 größer café naïve 図 🙂",
)

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] in ['image', 'image_url'] %}{{ '<image>\n' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_tokenizer(*, with_image_token: bool) -> PreTrainedTokenizerFast:
    """Train the tokenizer; equal on every call. Message end is its end of sequence, as in ChatML models."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_BASE_TOKENS,
        special_tokens=[END_OF_TEXT, MESSAGE_START, MESSAGE_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(SENTENCES, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=MESSAGE_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
    if with_image_token:
        tokenizer.add_tokens([IMAGE_TOKEN], special_tokens=True)
    return tokenizer
