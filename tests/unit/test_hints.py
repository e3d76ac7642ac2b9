"""Hints among a request's parameters: what is understood, and that nothing else is an error."""

import pytest

from kvtiers.types import NO_HINTS, RequestHints, request_hints


def test_each_hint_is_read_by_its_name():
    params = {"session": "s1", "session_ends": True, "expects_turn_in": 30, "output_tokens": 7, "kv_load_tiers": []}
    assert request_hints(params) == RequestHints("s1", session_ends=True, expects_turn_in=30.0, output_tokens=7)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"session": 7, "session_ends": "yes", "expects_turn_in": "soon", "output_tokens": 1.5},
        {"session_ends": 1, "expects_turn_in": True, "output_tokens": True},
        {"expects_turn_in": float("nan"), "output_tokens": -1},
        {"expects_turn_in": float("inf"), "session": None},
        {"expects_turn_in": -1.0},
    ],
)
def test_what_is_of_another_kind_is_absent(params):
    assert request_hints(params) is NO_HINTS
