"""A second of fuzzing for every parser of outside bytes, with the same inputs each time; for more see `__main__`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS, Target, run

NUM_EXAMPLES = 60


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name.replace(" ", "-"))
def test_outside_bytes_become_a_value_or_a_refusal_at_a_cost_in_proportion(target: Target) -> None:
    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(st.data())
    def fuzz(data: Any) -> None:
        run(target, data.draw(target.inputs))

    fuzz()
