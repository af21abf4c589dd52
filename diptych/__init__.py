"""Diptych serves vision-language models as two panels: an encoder that sees and an engine that speaks.

`LLM` answers batches in this process, without servers; `Client` asks a running server. Both load on first use, so that
`import diptych` costs nothing and works where torch is not installed.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diptych.client import Client
    from diptych.llm import LLM
    from shared.sampling import Constraint, SamplingParams

__all__ = ["LLM", "Client", "Constraint", "SamplingParams", "__version__"]

__version__ = metadata.version("diptych")

_HOMES = {
    "LLM": "diptych.llm",
    "Client": "diptych.client",
    "Constraint": "shared.sampling",
    "SamplingParams": "shared.sampling",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'diptych' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
