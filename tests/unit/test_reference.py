"""The page of all settings says what the settings say."""

from __future__ import annotations

import pytest

from diptych.reference import FILE, SERVICES, reference


def test_the_page_is_the_one_that_the_settings_make():
    assert FILE.read_text() == reference(), "run: python -m diptych.reference"


@pytest.mark.parametrize("service", SERVICES)
def test_every_setting_says_what_it_means(service: str):
    fields = SERVICES[service].model_fields
    assert [name for name, field in fields.items() if not field.description] == []
