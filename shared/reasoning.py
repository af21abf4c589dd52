"""How models mark the reasoning that comes before an answer.

The engine sees in a chat template which marks its model uses; the gateway keeps apart what stands between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

ReasoningFormat = Literal["think", "mistral"]
# How an answer begins: inside of reasoning that the prompt has opened, or with reasoning if the model wants to.
ReasoningStart = Literal["open", "optional"]


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    opening: str
    closing: str


REASONING_MARKS: Final[dict[ReasoningFormat, ReasoningMarks]] = {
    "think": ReasoningMarks("<think>", "</think>"),  # DeepSeek R1, Qwen3, QwQ and most others
    "mistral": ReasoningMarks("[THINK]", "[/THINK]"),  # Magistral, as special tokens
}
