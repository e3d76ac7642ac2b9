"""A replay's results as plain data."""

import json

import pytest

from kvtiers.api import Secret, TierConfig
from kvtiers.config import load_config
from kvtiers.metrics import Histogram
from kvtiers_replay.results import Latencies, Link, ReplayResults, config_as_data


def test_percentiles_of_samples_are_exact_and_every_sample_is_in_its_bucket() -> None:
    taken = Latencies.of_samples([0.001 * number for number in range(100, 0, -1)])
    assert (taken.p50, taken.p99, taken.worst) == (0.05, 0.099, 0.1)
    assert taken.count == 100
    assert taken.total == pytest.approx(5.05)
    below = sum(taken.counts[: taken.bounds.index(next(b for b in taken.bounds if b >= 0.05)) + 1])
    assert 50 <= below <= 72  # the bucket that has 0.05 ends less than the square root of 2 above it


def test_a_time_beyond_all_bounds_is_counted_too() -> None:
    assert Latencies.of_samples([1e6]).counts[-1] == 1


def test_of_the_managers_histogram_a_percentile_is_its_buckets_upper_edge() -> None:
    seen = Histogram()
    for seconds in (*[0.0001] * 98, 0.003, 1.5):
        seen.observe(seconds)
    read = Latencies.of_histogram(seen.as_data())
    assert read.count == 100
    assert read.p50 == seen.quantile(0.5)
    assert read.p99 == seen.quantile(0.99) == 2**-8
    assert read.worst == 2.0


@pytest.mark.parametrize("empty", [Latencies.of_samples([]), Latencies.of_histogram(Histogram().as_data())])
def test_nothing_observed_is_all_zeros(empty) -> None:
    assert (empty.count, empty.p50, empty.p99, empty.worst) == (0, 0.0, 0.0, 0.0)


def test_results_are_json_as_they_are() -> None:
    results = ReplayResults("t", links={"gpu -> primary": Link(4096, 0.5)}, stalls=Latencies.of_samples([0.1]))
    results.over_time.hit_rates["gpu"] = [None, 0.5]
    read = json.loads(results.to_json())
    assert read["bytes"] == {"gpu -> primary": 4096}
    assert read["links"] == {"gpu -> primary": {"nbytes": 4096, "seconds": 0.5}}
    assert read["over_time"]["hit_rates"]["gpu"] == [None, 0.5]
    assert read["stalls"]["worst"] == 0.1
    assert read["first_token"] is None


class _FarTier(TierConfig):
    url: str
    password: Secret


def test_a_config_is_shown_without_its_secrets(monkeypatch) -> None:
    monkeypatch.setenv("HIDDEN_PASSWORD", "xyzzy")
    far = _FarTier(type="far", url="far://me:${HIDDEN_PASSWORD}@there/0", password="${HIDDEN_PASSWORD}")
    config = load_config({"version": 1, "primary": {"capacity": "1MiB"}}).model_copy(update={"secondary": (far,)})
    shown = config_as_data(config)
    assert shown["primary"]["capacity"] == 1 << 20
    assert shown["secondary"][0]["url"] == "far://***@there/0"
    assert shown["secondary"][0]["password"] == "Secret(from ${HIDDEN_PASSWORD})"
    assert "xyzzy" not in json.dumps(shown)
