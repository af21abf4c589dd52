"""Messages with image references -> token ids and image spans.

The one place where text becomes placeholders: only an image *part* ever does. A user who types `<image>`, or any other
special token's spelling, gets ordinary text.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Any

from services.text_engine.chat_template import ChatTemplate
from services.text_engine.core.sequence import ImageSpan
from services.text_engine.tokenizer import Tokenizer
from shared.errors import InvalidRequest, UnsupportedFeature
from shared.wire import ChatMessage, ImagePart, ImageRef, TextPart


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids in which every image takes `num_tokens` placeholder positions, and where those are."""

    token_ids: list[int]
    images: tuple[ImageSpan, ...]
    image_refs: tuple[ImageRef, ...]

    @property
    def num_image_tokens(self) -> int:
        return sum(span.num_tokens for span in self.images)


class PromptBuilder:
    """Renders, tokenizes and expands prompts for one model.

    image_token_id   the placeholder's id; None for a text-only model
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, image_token_id: int | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._image_token_id = image_token_id
        self._image_token = None if image_token_id is None else tokenizer.token_string(image_token_id)
        if image_token_id is not None and self._image_token is None:
            raise ValueError(f"the tokenizer has no token for the image placeholder id {image_token_id}")

    def from_prompt(self, prompt: str | list[int], vocab_size: int) -> Prompt:
        """A plain completion prompt; special tokens' spellings count, as they do for other servers."""
        if isinstance(prompt, str):
            token_ids = self._tokenizer.encode(prompt, add_special_tokens=True)
        else:
            token_ids = list(prompt)
            bad = next((t for t in token_ids if not 0 <= t < vocab_size), None)
            if bad is not None:
                raise InvalidRequest(f"prompt holds token id {bad}; ids go from 0 to {vocab_size - 1}", param="prompt")
        if self._image_token_id is not None and self._image_token_id in token_ids:
            raise InvalidRequest(
                f"prompt holds the image placeholder {self._image_token!r}; send images in a chat request",
                param="prompt",
            )
        if not token_ids:
            raise InvalidRequest("prompt is empty; give at least one token", param="prompt")
        return Prompt(token_ids, (), ())

    def from_messages(self, messages: list[ChatMessage], tools: list[dict[str, Any]] | None = None) -> Prompt:
        """A conversation, rendered by the chat template, images where the template puts them."""
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        refs = tuple(p.image for m in messages for p in m.content if isinstance(p, ImagePart))
        if refs and self._image_token is None:
            raise UnsupportedFeature("this model takes text only; remove the image parts", param="messages")
        guard = _SpecialTextGuard(self._tokenizer.special_strings)
        rendered = self._template.render([self._for_template(m, guard) for m in messages], tools)
        return self._expand(self._tokenize(rendered, guard), refs)

    def _for_template(self, message: ChatMessage, guard: _SpecialTextGuard) -> dict[str, Any]:
        """One message in the shape this template takes; text-only content is one string wherever it can be."""
        assert self._template is not None
        result: dict[str, Any] = {"role": message.role}
        has_images = any(isinstance(part, ImagePart) for part in message.content)
        if self._template.takes_parts and (has_images or not self._template.takes_string):
            result["content"] = [
                {"type": "text", "text": guard.protect(part.text)} if isinstance(part, TextPart) else {"type": "image"}
                for part in message.content
            ]
        else:
            result["content"] = "\n".join(
                guard.protect(part.text) if isinstance(part, TextPart) else str(self._image_token)
                for part in message.content
            )
        for name in ("name", "tool_calls", "tool_call_id"):
            if (value := getattr(message, name)) is not None:
                result[name] = value
        return result

    def _tokenize(self, rendered: str, guard: _SpecialTextGuard) -> list[int]:
        bos = self._tokenizer.bos_token
        # transformers' processors add special tokens unless the template did; its text tokenizers never do.
        add_special = self._image_token is not None and not (bos and rendered.startswith(bos))
        token_ids: list[int] = []
        for i, (text, is_literal) in enumerate(guard.split(rendered)):
            if is_literal:
                token_ids += self._tokenizer.encode_literal(text)
            else:
                token_ids += self._tokenizer.encode(text, add_special_tokens=add_special and i == 0)
        return token_ids

    def _expand(self, token_ids: list[int], refs: tuple[ImageRef, ...]) -> Prompt:
        """Replace the i-th image mark by as many placeholders as the i-th image has rows."""
        marks = [i for i, token_id in enumerate(token_ids) if token_id == self._image_token_id]
        if len(marks) != len(refs):
            raise InvalidRequest(
                f"the chat template shows {len(marks)} of the {len(refs)} images; it may not allow images in this role "
                "or place",
                param="messages",
            )
        expanded: list[int] = []
        spans = []
        previous = 0
        for mark, ref in zip(marks, refs, strict=True):
            expanded += token_ids[previous:mark]
            spans.append(ImageSpan(ref.image_key, len(expanded), ref.num_tokens))
            expanded += [token_ids[mark]] * ref.num_tokens
            previous = mark + 1
        return Prompt(expanded + token_ids[previous:], tuple(spans), refs)


class _SpecialTextGuard:
    """Carries user text through the template without letting it spell special tokens.

    Each such spelling is swapped for a mark that no user can guess, and given back as literal text afterwards.
    """

    def __init__(self, special_strings: tuple[str, ...]) -> None:
        self._pattern = re.compile("|".join(map(re.escape, special_strings))) if special_strings else None
        self._nonce = secrets.token_hex(8)
        self._literals: list[str] = []

    def protect(self, text: str) -> str:
        return self._pattern.sub(self._mark, text) if self._pattern else text

    def _mark(self, match: re.Match[str]) -> str:
        self._literals.append(match.group())
        return f"\ue000{self._nonce}.{len(self._literals) - 1}\ue001"

    def split(self, rendered: str) -> list[tuple[str, bool]]:
        """Pieces in order, each with whether it is literal text; a whole prompt without literals is one piece."""
        if not self._literals:
            return [(rendered, False)]
        pieces = re.split(f"\ue000{self._nonce}\\.(\\d+)\ue001", rendered)
        typed = [(p, False) if i % 2 == 0 else (self._literals[int(p)], True) for i, p in enumerate(pieces)]
        return [(text, is_literal) for text, is_literal in typed if text]
