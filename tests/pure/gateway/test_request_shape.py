"""request_shape: what no valid request looks like ends before vLLM's request models see it."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.openai_errors import ApiError
from deployments.request_shape import MESSAGES_MAX, PROMPTS_MAX, VALUES_MAX, check_shape

USER = {"role": "user", "content": "x"}

REFUSED: list[tuple[dict[str, Any], str | None]] = [
    ({"messages": "hello"}, "messages"),
    ({"messages": [7]}, "messages[0]"),
    ({"messages": [USER, {"content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": 5}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{}, 5]}]}, "messages[0].content[1]"),
    ({"messages": [USER] * (MESSAGES_MAX + 1)}, "messages"),
    ({"messages": [{"role": "user", "content": ["x"] * 60_000}]}, "messages"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [[1], ["a"]]}, "prompt"),
    ({"prompt": ["a"] * (PROMPTS_MAX + 1)}, "prompt"),
    ({"n": 129}, "n"),
    ({"structured_outputs": {"choice": ["x"] * 3_000}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs"),
    ({"response_format": {"json_schema": {"enum": ["x"] * 3_000}}}, "response_format"),
    ({"stop": ["x"] * (VALUES_MAX + 1)}, None),
    ({"tools": [{"type": "function"}] * VALUES_MAX}, None),
]


@pytest.mark.parametrize(("body", "param"), REFUSED)
def test_refused(body: dict[str, Any], param: str | None) -> None:
    """A body of an impossible shape is the client's mistake, with the place that is wrong."""
    with pytest.raises(ApiError) as caught:
        check_shape(body)
    assert caught.value.status == 400
    assert caught.value.body["error"]["param"] == param


@given(
    st.one_of(
        st.fixed_dictionaries({"prompt": st.one_of(st.text(), st.lists(st.integers()), st.lists(st.text()))}),
        st.fixed_dictionaries({"prompt": st.lists(st.lists(st.integers()))}),
        st.fixed_dictionaries({"messages": st.lists(st.fixed_dictionaries({"role": st.text(), "content": st.text()}))}),
    )
)
def test_valid_shapes_pass(body: dict[str, Any]) -> None:
    """Every shape that OpenAI documents passes, whatever is in it."""
    check_shape(body)


def test_a_million_wrong_messages_cost_little() -> None:
    """The first wrong element ends the check."""
    body = {"messages": [7] * 1_000_000}
    begun = time.process_time()
    with pytest.raises(ApiError):
        check_shape(body)
    assert time.process_time() - begun < 0.5
