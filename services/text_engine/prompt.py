"""Messages with image references -> token ids and image spans.

The one place where text becomes placeholders: only an image *part* ever does. A user who types `<image>`, or any other
special token's spelling, gets ordinary text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from services.text_engine.chat_template import ChatTemplate, text_part
from services.text_engine.core.sequence import ImageSpan
from services.text_engine.tokenizer import Tokenizer
from services.text_engine.tool_prompt import parsed_calls, spell_tools
from shared.errors import ContextTooLong, InvalidRequest, UnsupportedFeature, UpstreamFailed
from shared.reasoning import ReasoningMarks, ReasoningStart
from shared.wire.engine import ChatMessage, ImagePart, TextPart, ToolFormat
from shared.wire.images import ImageRef


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids in which every row of every image has its placeholder position, and where those are.

    reasoning   how the answer begins if the model marks its reasoning; None: with the answer itself
    """

    token_ids: list[int]
    images: tuple[ImageSpan, ...]
    image_refs: tuple[ImageRef, ...]
    reasoning: ReasoningStart | None = None


class PromptBuilder:
    """Renders, tokenizes and expands prompts for one model.

    image_token_id   the placeholder's id; None for a text-only model
    image_mark_id    what the template writes for an image; None: the placeholder
    reasoning        how the model marks its reasoning, if it does
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        image_token_id: int | None,
        image_mark_id: int | None = None,
        reasoning: ReasoningMarks | None = None,
        max_model_len: int | None = None,
    ) -> None:
        """max_model_len   of prompt and answer together; None: a prompt may have any length"""
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._template = template
        self._reasoning = reasoning
        self._image_token_id = image_token_id
        self._image_token = None if image_token_id is None else tokenizer.token_string(image_token_id)
        if image_token_id is not None and self._image_token is None:
            raise ValueError(f"the tokenizer has no token for the image placeholder id {image_token_id}")
        self._image_mark = self._image_token if image_mark_id is None else tokenizer.token_string(image_mark_id)
        if image_mark_id is not None and self._image_mark is None:
            raise ValueError(f"the tokenizer has no token for the image mark id {image_mark_id}")

    @property
    def tool_format(self) -> ToolFormat:
        """How the model writes calls of tools, as far as its template tells."""
        return "hermes" if self._template is None else self._template.tool_format

    def from_prompt(self, prompt: str | list[int], vocab_size: int) -> Prompt:
        """A plain completion prompt; special tokens' spellings count, as they do for other servers."""
        if isinstance(prompt, str):
            self._check_length(len(prompt), param="prompt")
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

    def from_messages(
        self,
        messages: list[ChatMessage],
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> Prompt:
        """A conversation, rendered by the chat template, images where the template puts them."""
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        refs = tuple(p.image for m in messages for p in m.content if isinstance(p, ImagePart))
        if refs and self._image_token is None:
            raise UnsupportedFeature("this model takes text only; remove the image parts", param="messages")
        num_characters = sum(len(p.text) for m in messages for p in m.content if isinstance(p, TextPart))
        self._check_length(num_characters, param="messages")
        if not self._template.takes_tools:
            messages, tools = spell_tools(messages, tools), None
        guard = _SpecialTextGuard(self._tokenizer.special_strings)
        shown = [self._for_template(message, guard) for message in messages]
        rendered = self._template.render(shown, guard.protect_all(tools), guard.protect_all(dict(template_kwargs)))
        prompt = self._expand(self._tokenize(self._lay_out(rendered, refs), guard), refs)
        return replace(prompt, reasoning=self._reasoning_after(rendered))

    def _reasoning_after(self, rendered: str) -> ReasoningStart | None:
        """Templates open the reasoning themselves, or open and close it if the model shall not think."""
        if self._reasoning is None:
            return None
        end = rendered.rstrip()
        if end.endswith(self._reasoning.opening):
            return "open"
        return None if end.endswith(self._reasoning.closing) else "optional"

    def _for_template(self, message: ChatMessage, guard: _SpecialTextGuard) -> dict[str, Any]:
        """One message in the shape this template takes; text-only content is one string wherever it can be."""
        assert self._template is not None
        result: dict[str, Any] = {"role": message.role}
        has_images = any(isinstance(part, ImagePart) for part in message.content)
        if self._template.takes_parts and (has_images or not self._template.takes_string):
            result["content"] = _parts_for_template(message, guard)
        else:
            result["content"] = "\n".join(
                guard.protect(part.text) if isinstance(part, TextPart) else str(self._image_mark)
                for part in message.content
            )
        fields = {
            "name": message.name,
            "reasoning_content": message.reasoning_content,
            "tool_calls": parsed_calls(message) if self._template.takes_parsed_arguments else message.tool_calls,
            "tool_call_id": message.tool_call_id,
        }
        return result | {name: guard.protect_all(value) for name, value in fields.items() if value}

    def _check_length(self, num_characters: int, *, param: str) -> None:
        """Raises ContextTooLong for text that cannot fit: encoding takes 200 times its size, and in the end minutes."""
        fewest = self._tokenizer.fewest_tokens(num_characters)
        if self._max_model_len is not None and fewest > self._max_model_len:
            raise ContextTooLong(
                f"the text has {num_characters} characters, which are {fewest} tokens at least; this model takes "
                f"{self._max_model_len} tokens of prompt and answer together",
                param=param,
            )

    def _tokenize(self, rendered: str, guard: _SpecialTextGuard) -> list[int]:
        self._check_length(len(rendered), param="messages")
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

    def _lay_out(self, rendered: str, refs: tuple[ImageRef, ...]) -> str:
        """Replace the i-th image mark by the i-th image's layout, one placeholder for each run of rows.

        In the text and not in its tokens, as the reference processors do: a layout's own text may merge with its
        neighbours.
        """
        if self._image_token is None or self._image_mark is None:
            return rendered
        first, *others = rendered.split(self._image_mark)
        if len(others) != len(refs):
            raise InvalidRequest(
                f"the chat template shows {len(others)} of the {len(refs)} images; it may not allow images in this "
                "role or place",
                param="messages",
            )
        pieces = [first]
        for ref, text in zip(refs, others, strict=True):
            pieces += (piece if isinstance(piece, str) else self._image_token for piece in ref.pieces)
            pieces.append(text)
        return "".join(pieces)

    def _expand(self, token_ids: list[int], refs: tuple[ImageRef, ...]) -> Prompt:
        """Replace each placeholder by as many as its run has rows."""
        runs = [run for ref in refs for run in _runs(ref)]
        marks = [i for i, token_id in enumerate(token_ids) if token_id == self._image_token_id]
        if len(marks) != len(runs):
            raise UpstreamFailed(f"{len(marks)} places for image rows where the encoders' layouts have {len(runs)}")
        expanded: list[int] = []
        spans = []
        previous = 0
        for mark, run in zip(marks, runs, strict=True):
            expanded += token_ids[previous:mark]
            spans.append(replace(run, start=len(expanded)))
            expanded += [token_ids[mark]] * run.num_tokens
            previous = mark + 1
        return Prompt(expanded + token_ids[previous:], tuple(spans), refs)


def _parts_for_template(message: ChatMessage, guard: _SpecialTextGuard) -> list[dict[str, str]]:
    parts: list[dict[str, str]] = []
    before = ""
    for part in message.content:
        if isinstance(part, TextPart):
            parts.append(text_part(guard.protect(part.text, before)))
            before += part.text.strip()  # as some templates do
        else:
            parts.append({"type": "image"})
            before = ""
    return parts


def _runs(ref: ImageRef) -> Iterator[ImageSpan]:
    """The image's runs of rows, in order; where they start is not known yet."""
    first_row = 0
    for piece in ref.pieces:
        if isinstance(piece, int):
            yield ImageSpan(ref.image_key, 0, piece, first_row, ref.grid, ref.attention)
            first_row += piece


class _SpecialTextGuard:
    """Carries user text through the template without letting it spell special tokens.

    Each such spelling is swapped for a mark that no user can guess, and given back as literal text afterwards.
    """

    def __init__(self, special_strings: tuple[str, ...]) -> None:
        self._special_strings = special_strings
        self._pattern = re.compile("|".join(map(re.escape, special_strings))) if special_strings else None
        self._nonce = secrets.token_hex(8)
        self._literals: list[str] = []

    def protect(self, text: str, before: str = "") -> str:
        """before   the user's text that the template may put right in front: neither may end what the other begins"""
        protected = self._pattern.sub(lambda match: self._mark(match.group()), text) if self._pattern else text
        return self._mark("") + protected if self._spells_across(before, text.lstrip()) else protected

    def _spells_across(self, before: str, text: str) -> bool:
        return bool(before and text) and any(
            before.endswith(special[:length]) and text.startswith(special[length:])
            for special in self._special_strings
            for length in range(1, len(special))
        )

    def protect_all(self, value: Any) -> Any:
        """Every text in a JSON value."""
        if isinstance(value, str):
            return self.protect(value)
        if isinstance(value, list):
            return [self.protect_all(item) for item in value]
        if isinstance(value, dict):
            return {self.protect(name): self.protect_all(item) for name, item in value.items()}
        return value

    def _mark(self, literal: str) -> str:
        self._literals.append(literal)
        return f"\ue000{self._nonce}.{len(self._literals) - 1}\ue001"

    def split(self, rendered: str) -> list[tuple[str, bool]]:
        """Pieces in order, each with whether it is literal text; a whole prompt without literals is one piece."""
        if not self._literals:
            return [(rendered, False)]
        pieces = re.split(f"\ue000{self._nonce}\\.(\\d+)\ue001", rendered)
        typed = [(p, False) if i % 2 == 0 else (self._literals[int(p)], True) for i, p in enumerate(pieces)]
        return [(text, is_literal) for text, is_literal in typed if text]
