"""What the benchmarks of tiers share: shares and goals are what they say, and a peer that cannot be had is left out."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def peer(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return lambda name: importlib.import_module(f"peers.{name}")


def test_a_share_is_of_turns_beside_each_other_and_none_is_without_its_other(peer) -> None:
    results = peer("results")
    assert results.middle_share([1.0, 9.0, 30.0], [2.0, 10.0, 10.0]) == 0.9
    with pytest.raises(ValueError, match="shorter"):
        results.middle_share([1.0, 2.0], [1.0])


def test_goals_are_met_at_the_goal_and_not_past_it(peer) -> None:
    results = peer("results")
    assert [results.at_least("share", value, 0.9)["met"] for value in (0.89, 0.9, 1.0)] == [False, True, True]
    assert [results.at_most("requests", value, 9)["met"] for value in (8, 9, 10)] == [True, True, False]


@pytest.mark.parametrize(
    ("python", "why"), [("/nowhere/python", "No such file"), ("/bin/false", "its process ended with status 1")]
)
def test_a_python_that_cannot_run_the_connector_leaves_it_out_and_says_why(peer, python, why) -> None:
    lmcache = peer("lmcache_s3")
    with (
        pytest.raises(lmcache.LeftOutError, match=why),
        lmcache.LMCacheS3(python, "http://127.0.0.1:1", ("key", "secret"), 64 << 10, 2),
    ):
        pass
