"""How many hosts a tier has, and what each of several is sent."""

import pytest

from kvtiers.api import RateLimit, TierConfig, TierPlugin
from kvtiers.secondary.placement import host_count, share_of, store_threads


def plugin(**facts):
    return TierPlugin(name="t", kind="store", config=TierConfig, open=None, api_version=1, **facts)


SHARED = plugin(shareable=True)
LOCAL = plugin(shareable=True, writes_locally=True)


@pytest.mark.parametrize(
    ("processors", "options", "count"),
    [
        (1, {}, 1),
        (2, {}, 1),
        (3.5, {}, 1),
        (4, {}, 2),
        (12, {}, 6),
        (64, {}, 8),
        (64, {"cpus": [0, 1, 2, 3, 4, 5, 6, 7]}, 4),
        (2, {"cpus": [0, 1, 2, 3, 4, 5, 6, 7]}, 1),
        (2, {"processes": 3}, 3),
        (64, {"processes": 1}, 1),
        (64, {"quotas": {"blue": "1GiB"}}, 1),
    ],
)
def test_how_many_hosts_a_tier_has_by_itself(monkeypatch, processors, options, count):
    monkeypatch.setattr("kvtiers.secondary.placement.usable_processors", lambda: processors)
    assert host_count(TierConfig(type="t", **options), SHARED) == count
    if "processes" not in options:
        assert host_count(TierConfig(type="t", **options), plugin()) == 1, (
            "a store that does not say that it can be shared"
        )


@pytest.mark.parametrize("count", [2, 3, 7])
def test_hosts_share_the_rate_limits(count):
    config = TierConfig(type="t", rate_limit=RateLimit(bytes_per_second=1_000_000, requests_per_second=5.0))
    limit = share_of(config, SHARED, count).rate_limit
    assert 0.99 < count * limit.bytes_per_second / 1_000_000 <= 1
    assert count * limit.requests_per_second == pytest.approx(5.0)
    assert share_of(TierConfig(type="t"), SHARED, count).rate_limit == RateLimit()
    least = share_of(TierConfig(type="t", rate_limit=RateLimit(bytes_per_second=1)), SHARED, count).rate_limit
    assert least.bytes_per_second == 1


@pytest.mark.parametrize(
    ("processors", "options", "here", "elsewhere"),
    [
        (16, {}, 1, 3),
        (16, {"processes": 2}, 3, 3),
        (16, {"processes": 2, "threads": 9}, 4, 8),
        (2, {}, 1, 3),
        (1, {}, 1, 3),
        (64, {"cpus": [0, 1, 2, 3], "processes": 1, "threads": 8}, 2, 7),
        (64, {"threads": 1}, 1, 1),
        (16, {"threads": 6, "store_threads": 5}, 5, 5),
    ],
)
def test_all_hosts_of_a_tier_write_on_half_of_the_processors_at_most(monkeypatch, processors, options, here, elsewhere):
    monkeypatch.setattr("kvtiers.secondary.placement.usable_processors", lambda: processors)
    config = TierConfig(type="t", **options)
    for kind, expected in ((LOCAL, here), (SHARED, elsewhere)):
        assert store_threads(config, kind, host_count(config, kind)) == expected
        assert share_of(config, kind, host_count(config, kind)).store_threads == expected, "what each host is given"


@pytest.mark.parametrize(("threads", "store_threads"), [(4, 4), (4, 0), (1, 2)])
def test_a_thread_is_kept_for_loads(threads, store_threads):
    with pytest.raises(ValueError, match="expected 1 to"):
        TierConfig(type="t", threads=threads, store_threads=store_threads)


def test_each_of_several_hosts_is_one_with_all_the_threads():
    share = share_of(TierConfig(type="t", processes=3, threads=5), SHARED, 3)
    assert (share.processes, share.threads) == (1, 5)
