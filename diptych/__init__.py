"""Diptych serves vision-language models as two panels: an encoder that sees and an engine that speaks.

`LLM` answers batches in this process, without servers; `Client` asks a running server. Both load on first use, so that
`import diptych` costs nothing and works where torch is not installed.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diptych.client import Client
    from diptych.llm import LLM
    from shared.sampling import Constraint, SamplingParams

    __version__: str

__all__ = ["LLM", "Client", "Constraint", "SamplingParams", "__version__"]

# Encoder and engine share the cores and mostly take turns. An idle OpenMP thread spins, by default, on a core that
# others could use, and a step that meets such a thread takes ten times as long; one that sleeps at once must be woken
# for every product. 2000 spins bridge the gaps inside a step and no more: decoding 16 rows takes 15 ms a step so, as
# with endless spinning, and 22 ms with OMP_WAIT_POLICY=PASSIVE. KMP_BLOCKTIME is what Intel's and LLVM's OpenMP have
# for it. Read when torch is loaded, so it is said here, before; a variable that is already set is left alone.
THREAD_ENVIRONMENT = {"GOMP_SPINCOUNT": "2000", "KMP_BLOCKTIME": "1"}
for _name, _value in THREAD_ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

_HOMES = {
    "LLM": "diptych.llm",
    "Client": "diptych.client",
    "Constraint": "shared.sampling",
    "SamplingParams": "shared.sampling",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib import metadata  # late: it takes longer than everything else here

        return metadata.version("diptych")
    if name not in _HOMES:
        raise AttributeError(f"module 'diptych' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
