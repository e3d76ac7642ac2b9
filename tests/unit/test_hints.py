"""Hints among a request's parameters: what is understood, and that nothing else is an error."""

import numpy as np
import pytest
from tests.unit.test_runtime import KEYS, LAYOUT

import kvtiers
from kvtiers.types import (
    NO_HINTS,
    NO_RETENTION,
    RequestContext,
    RequestHints,
    Retention,
    request_hints,
    retention_of,
)


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
        {"expects_turn_in": 10**400},  # JSON has such numbers
        {"expects_turn_in": 1e300, "output_tokens": 10**400},
        {"session": "s" * 257},  # a policy would keep it with each run
    ],
)
def test_what_is_of_another_kind_is_absent(params):
    assert request_hints(params) is NO_HINTS


def test_of_a_list_of_tiers_no_more_is_read_than_there_can_be():
    """A million names took the engine's thread a second for each tier."""
    assert RequestContext("r", {"kv_load_tiers": ["x"] * 255 + ["FS"]}).may_load_from("fs")
    assert not RequestContext("r", {"kv_load_tiers": ["x"] * 256 + ["fs"]}).may_load_from("fs")
    assert not RequestContext("r", {"kv_load_tiers": ["x" * 10_000_000, "disk"]}).may_load_from("fs")


@pytest.mark.parametrize("eviction", ["lru", "turn-hazard"])
def test_whatever_numbers_a_client_sends_its_request_begins_and_ends(eviction):
    """One that raises at its begin would be one that never ends for the tiers."""
    primary = {"capacity": "1MiB", "prefault": False, "eviction": eviction}
    config = {"version": 1, "primary": primary}
    manager = kvtiers.open_manager(config, LAYOUT)
    worker = kvtiers.open_worker(config, LAYOUT, [np.zeros((8, 4000), np.uint8)], engine_id=manager.engine_id)
    try:
        manager.wait_ready(60)
        for number, params in enumerate(
            ({"expects_turn_in": 10**400}, {"output_tokens": 10**400}, {"session": "s" * 10_000_000, "session_ends": 1})
        ):
            ctx = RequestContext(f"r{number}", params)
            manager.on_new_request(ctx, 100)
            plan = manager.prepare_store(KEYS[number : number + 2], ctx)
            manager.complete_store(plan)
            manager.on_request_finished(ctx, 7)
            manager.on_schedule_end()
        assert not manager._requests._open
        assert not manager._requests._closing
        assert manager._waits.gpu.waiting == 0
    finally:
        worker.shutdown()
        manager.shutdown(1.0)


@pytest.mark.parametrize(
    ("params", "found"),
    [
        ({"ttl": "1h"}, Retention("normal", 3600.0)),
        ({"ttl": 90, "priority": "high"}, Retention("high", 90.0)),
        ({"priority": "high"}, Retention("high", 600.0)),
        ({"priority": "high", "ttl": "soon"}, Retention("high", 600.0)),
        ({"priority": "low"}, Retention("low", 0.0)),
        ({"priority": "low", "ttl": "1h"}, Retention("low", 0.0)),
        ({"ttl": 10**400}, Retention("normal", 86_400.0)),
        ({"ttl": "30d"}, Retention("normal", 86_400.0)),
    ],
)
def test_how_long_a_prompt_is_to_stay_is_read_and_clipped(params, found):
    assert retention_of(params) == found


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"priority": "normal"},
        {"priority": 7, "ttl": True},
        {"priority": ["high"], "ttl": -1},
        {"ttl": 0},
        {"ttl": float("nan")},
        {"ttl": float("inf")},
        {"ttl": "1 fortnight"},
        {"ttl": "1" * 10_000_000},
        {"ttl": {"h": 1}},
    ],
)
def test_what_is_no_retention_is_absent(params):
    assert retention_of(params) is NO_RETENTION
