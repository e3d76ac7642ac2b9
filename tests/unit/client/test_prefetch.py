"""``client.prefetch``: what is brought from which tier into which, and what is not near in the end."""

import pytest

from kvtiers import ModelIdentity, open_client
from kvtiers.client.prefetch import Prefetch

IDENTITY = ModelIdentity(name="some-model", weights="commit-1", engine="test", kv_layout="pages")


def test_what_a_later_tier_has_is_loaded_and_stored_in_the_first_that_takes_stores(bench, played, keys):
    read_only, near, far = played(keys[0]), played(keys[1]), played(*keys)
    bench.drive(read_only, near, far, read_only=[read_only])
    request = bench.begin(Prefetch, keys)
    (load,) = far.jobs.values()
    assert (list(load.keys), load.is_promotion) == (keys[2:], True)
    assert request.near == set(keys[:2])
    far.end(success=True)
    bench.step()
    (store,) = near.jobs.values()
    assert (list(store.keys), store.is_promotion) == (keys[2:], False)
    assert list(store.chunk_ids) == list(load.chunk_ids), "from the same rows"
    assert not request.over.is_set()
    near.end(success=True)
    bench.step()
    assert request.over.is_set()
    assert request.near == set(keys)
    assert not read_only.jobs
    request.release()
    assert bench.free == 8


def test_what_is_lost_or_not_taken_on_the_way_is_not_near(bench, played, keys):
    near, far = played(), played(*keys)
    bench.drive(near, far)
    request = bench.begin(Prefetch, keys)
    far.end(*keys[1:])
    bench.step()
    near.end(*keys[2:])
    bench.step()
    assert request.over.is_set()
    assert request.near == set(keys[2:])
    assert request.error == "t1 has not given all values"


@pytest.mark.parametrize("why", ["unusable", "none has them"])
def test_without_a_tier_to_take_or_give_them_it_is_over_at_once(bench, played, keys, why):
    near, far = played(), played()
    near.usable = far.usable = why != "unusable"
    bench.drive(near, far)
    request = bench.begin(Prefetch, keys)
    assert request.over.is_set()
    assert request.near == set()
    assert request.error == ("no tier is usable" if why == "unusable" else "")
    assert (near.jobs, far.jobs) == ({}, {})


def test_a_tier_that_has_not_answered_is_waited_for_before_a_later_one_is_loaded_from(bench, played, keys):
    near, far = played(*keys), played(*keys)
    near.answers = False
    bench.drive(near, far)
    request = bench.begin(Prefetch, keys)
    assert not far.jobs
    near.answers = True
    bench.step()
    assert request.near == set(keys)


def test_a_client_brings_values_from_a_slow_tier_into_a_fast_one(tmp_path):
    def opened(*names):
        tiers = [
            {"type": "fs", "name": name, "path": str(tmp_path / name), "io": "thread", "capacity": "1GiB"}
            for name in names
        ]
        config = {"version": 1, "primary": {"capacity": "1MiB"}, "start_wait": "30s", "secondary": tiers}
        return open_client(config, IDENTITY, 4096, bounce_bytes=1 << 16)

    keys, values = [bytes([number]) * 8 for number in range(20)], [bytes([number]) * 4096 for number in range(20)]
    with opened("far") as far:
        assert all(far.put(keys, values).stored)
    with opened("near", "far") as both:
        assert both.prefetch([*keys, b"missing!"]) == [True] * 20 + [False]
        assert both.prefetch(keys[:1], value_bytes=7) == [False]
        assert both.stats()["prefetched_values"] == 20
    with opened("near") as near:
        read = [bytearray(4096) for _ in keys]
        assert near.get_into(keys, read) == [True] * 20
        assert [bytes(each) for each in read] == values
