"""Repairs what Triton's interpreter does to bfloat16, before any kernel runs in it."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("triton") is not None:
    from tests.kernels.interpreter import mend_bfloat16

    mend_bfloat16()
