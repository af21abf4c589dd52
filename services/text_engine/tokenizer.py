"""Text to token ids and back, on the Rust tokenizers library; transformers is imported only for folders without a
tokenizer.json. Knows each token's exact bytes, which is what makes streaming UTF-8 safe.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from shared.errors import InvalidRequest
from shared.log import get_logger
from shared.malloc import return_free_memory

log = get_logger(__name__)

# Characters of a text whose encoding, some 200 bytes a character, is worth giving back to the system afterwards.
LONG_TEXT = 1 << 18
# Characters that take a millisecond at most.
SHORT_TEXT = 1 << 12


class Tokenizer:
    """One checkpoint's tokenizer. Thread-safe: encoding never changes it."""

    def __init__(self, rust: RustTokenizer, config: dict[str, Any], *, shown: frozenset[str] = frozenset()) -> None:
        """shown   special tokens that add their spelling to the text all the same"""
        self._rust = rust
        self._shown = shown
        # A second instance reads special tokens' strings as ordinary text; the flag is not per call.
        self._literal = RustTokenizer.from_str(rust.to_str())
        self._literal.encode_special_tokens = True
        self.config = config

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read a Hugging Face folder. Raises FileNotFoundError if it holds no tokenizer that can be read."""
        config_file = folder / "tokenizer_config.json"
        config = json.loads(config_file.read_text()) if config_file.is_file() else {}
        if (folder / "tokenizer.json").is_file():
            return cls(RustTokenizer.from_file(str(folder / "tokenizer.json")), config)
        if not (folder / "tokenizer.model").is_file():
            raise FileNotFoundError(f"{folder} holds neither tokenizer.json nor tokenizer.model")
        from transformers import AutoTokenizer  # slow to import and rarely needed

        log.info("converting tokenizer.model; a tokenizer.json in the folder would start faster", folder=str(folder))
        return cls(AutoTokenizer.from_pretrained(folder).backend_tokenizer, config)

    def showing(self, *tokens: str) -> Tokenizer:
        """The same, with these special tokens in the text: they mark what others must be able to see."""
        return Tokenizer(self._rust, self.config, shown=self._shown | set(tokens))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Raises InvalidRequest for text that is not Unicode: JSON can spell half of a surrogate pair."""
        return _encode(self._rust, text, add_special_tokens=add_special_tokens)

    def encode_literal(self, text: str) -> list[int]:
        """Encode text in which the spelling of a special token is just letters."""
        return _encode(self._literal, text, add_special_tokens=False)

    def decode(self, token_ids: list[int]) -> str:
        """The text of whole sequence of ids, special tokens left out."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text; nothing for special and unknown ids."""
        table = self._bytes_table
        return table[token_id] if 0 <= token_id < len(table) else b""

    def spelled_bytes(self, token_id: int) -> bytes:
        """`token_bytes`, or the spelling of a token that adds nothing to the text."""
        return self.token_bytes(token_id) or (self.token_string(token_id) or "").encode()

    def token_id(self, token: str) -> int | None:
        found: int | None = self._rust.token_to_id(token)
        return found

    def token_string(self, token_id: int) -> str | None:
        found: str | None = self._rust.id_to_token(token_id)
        return found

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id that stands for a token."""
        return 1 + max(self._rust.get_vocab(with_added_tokens=True).values())

    @cached_property
    def _longest_token(self) -> int:
        """In bytes."""
        return max(1, *(len(self.spelled_bytes(token_id)) for token_id in range(self.vocab_size)))

    def fewest_tokens(self, num_characters: int) -> int:
        """A text of so many characters has no fewer tokens, whatever it says."""
        return -(-num_characters // self._longest_token)

    @cached_property
    def special_strings(self) -> tuple[str, ...]:
        """Spellings that encode() turns into special tokens, longest first."""
        added = self._rust.get_added_tokens_decoder().values()
        return tuple(sorted((t.content for t in added if t.special and t.content), key=len, reverse=True))

    @property
    def bos_token(self) -> str | None:
        return self._special("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self._special("eos_token")

    def _special(self, name: str) -> str | None:
        value = self.config.get(name)
        return value.get("content") if isinstance(value, dict) else value

    @cached_property
    def strips_leading_space(self) -> bool:
        """SentencePiece style: the space that marks the first word of a text is not part of it."""
        return any(step["type"] == "Strip" and step.get("start", 0) > 0 for step in self._decoder_steps)

    @cached_property
    def _decoder_steps(self) -> list[dict[str, Any]]:
        # Serialising a tokenizer takes a tenth of a second: once.
        decoder = json.loads(self._rust.to_str())["decoder"]
        if decoder is None:
            return []
        steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        return steps

    @cached_property
    def _bytes_table(self) -> list[bytes]:
        kinds = {step["type"] for step in self._decoder_steps}
        added = self._rust.get_added_tokens_decoder()
        table = [b""] * self.vocab_size
        for token, token_id in self._rust.get_vocab(with_added_tokens=True).items():
            if token_id in added:
                is_hidden = added[token_id].special and token not in self._shown
                table[token_id] = b"" if is_hidden else token.encode()
            elif "ByteLevel" in kinds:
                table[token_id] = bytes(_BYTE_OF_CHARACTER[character] for character in token)
            elif "ByteFallback" in kinds or "Metaspace" in kinds:
                table[token_id] = _sentencepiece_bytes(token)
            else:
                table[token_id] = self._rust.decode([token_id]).encode()
        return table


def _encode(rust: RustTokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    _check_unicode(text)
    if len(text) < SHORT_TEXT:
        encoding = rust.encode(text, add_special_tokens=add_special_tokens)
    else:  # a batch of one: only for batches does the library let other threads run meanwhile
        (encoding,) = rust.encode_batch([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    if len(text) >= LONG_TEXT:
        del encoding
        return_free_memory()
    return ids


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest("the prompt holds half of a surrogate pair, which is no character") from None


def _sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()


def _byte_level_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level BPE vocabularies (GPT-2's bytes_to_unicode), inverted."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHARACTER = _byte_level_alphabet()
