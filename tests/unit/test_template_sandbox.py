"""A chat template comes with a checkpoint, its variables from clients: neither reaches beyond the text it makes."""

from __future__ import annotations

from typing import Any

import pytest

from services.text_engine.chat_template import ChatTemplate
from shared.errors import InvalidRequest

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['__builtins__']['open']('/etc/passwd').read() }}",
        "{{ messages.append({}) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_that_reaches_for_more_is_refused(source: str):
    template = ChatTemplate("{% if messages %}" + source + "{% endif %}", bos_token=None, eos_token=None)
    with pytest.raises(InvalidRequest, match="the model's chat template refuses this"):
        template.render(HELLO)


@pytest.mark.parametrize("effort", [{}, [], 7, None, "high"])
def test_a_variable_of_a_type_that_the_template_does_not_count_on_is_the_requests_fault(effort: object):
    template = ChatTemplate(
        "{% if reasoning_effort is defined %}{{ 'Effort: ' + reasoning_effort }}{% endif %}{{ messages[0].content }}",
        bos_token=None,
        eos_token=None,
    )
    if effort == "high":
        assert template.render(HELLO, kwargs={"reasoning_effort": effort}) == "Effort: highhello"
        return
    with pytest.raises(InvalidRequest):
        template.render(HELLO, kwargs={"reasoning_effort": effort})
