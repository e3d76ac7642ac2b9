"""Prefetches of engines that start together: each chunk comes from the far tier once, whatever becomes of an engine."""

import errno
import os

import pytest

from kvtiers.tiering.fetch_once import FetchRights, Turn

from .harness import Bench, chain
from .test_prefetch import warm

KEYS = chain("h", 40)


class Herd:
    """Engines with one near tier and one far tier, in the same state; a step of each in turn is a round."""

    def __init__(self, count, *, hold=False, scope=None, rows=128):
        self.benches = [
            Bench(rows=rows, tiers={"near": {"shareable": True}, "far": {"read_only": True}}, hold=hold)
            for _ in range(count)
        ]
        for bench in self.benches:
            bench.tier["near"].values = self.benches[0].tier["near"].values
            bench.tier["far"].values = self.benches[0].tier["far"].values
            bench.manager._prefetches._rights._scope = lambda: scope or f"test-{os.getpid()}-{id(self)}"
        self.benches[0].tier["far"].put(KEYS)
        self.all = self.benches

    def fetched(self):
        return [key for bench in self.benches for job in bench.tier["far"].loads for key in job.keys]

    def run(self, rounds=400, *, seconds=0.01):
        for _ in range(rounds):
            for bench in self.benches:
                bench.step(seconds)
        return [bench.figures()["prefetched_chunks"] for bench in self.benches]

    def end(self):
        for bench in self.all:
            bench.manager.shutdown(0.0)
            assert not bench.manager._prefetches._rights._held


@pytest.fixture
def herd():
    herds = []

    def made(*args, **more):
        herds.append(Herd(*args, **more))
        return herds[-1]

    yield made
    for one in herds:
        one.end()


def test_four_engines_fetch_each_chunk_once_and_the_others_from_the_near_tier(herd):
    four = herd(4)
    for bench in four.benches:
        warm(bench, KEYS, tier="far")
    assert four.run() == [40] * 4
    assert sorted(four.fetched()) == sorted(KEYS)
    assert len({bench for bench in four.benches if bench.tier["far"].loads}) > 1, "they share the work"
    for bench in four.benches:
        assert bench.load(KEYS, bench.request())
        assert not bench.manager._prefetches._rights._held


def test_prefixes_of_requests_are_fetched_once_as_well(herd):
    two = herd(2)
    for bench in two.benches:
        assert bench.manager.prefetch(KEYS)
    assert two.run() == [40] * 2
    assert sorted(two.fetched()) == sorted(KEYS)


def test_two_prefetches_of_one_engine_share_what_they_fetch(herd):
    one = herd(1)
    (bench,) = one.benches
    warm(bench, KEYS, tier="far")
    assert bench.manager.prefetch(KEYS[:20])
    assert one.run() == [40]
    assert sorted(one.fetched()) == sorted(KEYS)


def test_an_engine_that_ends_in_the_midst_leaves_its_chunks_to_the_others(herd):
    """Its sockets are closed by the kernel, as here by hand."""
    two = herd(2, hold=True)
    gone, other = two.benches
    warm(gone, KEYS, tier="far")
    for _ in range(20):
        gone.step(0.01)
    assert gone.tier["far"].held, "it is fetching"
    other.tier["near"].hold = other.tier["far"].hold = False
    warm(other, KEYS, tier="far")
    two.benches = [other]
    two.run(100)
    taken = {key for held in gone.tier["far"].held.values() for key in held.job.keys}
    assert other.figures()["prefetched_chunks"] <= 40 - len(taken)
    rights = gone.manager._prefetches._rights
    rights.release_all()
    assert two.run(100) == [40]


def test_one_that_has_a_right_for_long_is_waited_for_no_longer_than_ten_seconds(herd):
    two = herd(2, hold=True)
    hung, other = two.benches
    warm(hung, KEYS, tier="far")
    for _ in range(20):
        hung.step(0.01)
    other.tier["near"].hold = other.tier["far"].hold = False
    warm(other, KEYS, tier="far")
    two.benches = [other]
    assert two.run(100)[0] < 40
    assert two.run(200, seconds=0.1) == [40]


@pytest.mark.parametrize("what", ["no near tier", "it is off", "it takes nothing", "no descriptors"])
def test_without_a_near_tier_or_rights_each_engine_fetches_for_itself(herd, monkeypatch, what):
    two = herd(2)
    for bench in two.benches:
        if what == "no near tier":
            bench.manager._slots[0].options = type(bench.manager._slots[0].options)("near")
        elif what == "it is off":
            bench.tier["near"].available = False
        elif what == "it takes nothing":
            bench.tier["near"].raises.add("submit_store")
    if what == "no descriptors":

        def none(self, key):
            raise OSError(errno.EMFILE, "none left")

        monkeypatch.setattr(FetchRights, "_bound", none)
    for bench in two.benches:
        warm(bench, KEYS, tier="far")
    assert two.run() == [40] * 2
    assert set(two.fetched()) == set(KEYS)
    assert not any(bench.manager._prefetches._rights._held for bench in two.benches)


@pytest.mark.parametrize("what", ["ended", "weights", "reset"])
def test_whatever_ends_a_prefetch_no_right_is_left(herd, what):
    one = herd(1, hold=True)
    (bench,) = one.benches
    warm(bench, KEYS, tier="far")
    for _ in range(10):
        bench.step(0.01)
    assert bench.manager._prefetches._rights._held
    if what == "ended":
        bench.manager.operations.warm_up_end(1)
    elif what == "weights":
        bench.manager.set_weights_version("other")
    else:
        bench.manager.reset_cache()
        bench.tier["far"].values.clear()
    bench.tier["near"].hold = bench.tier["far"].hold = False
    bench.tier["far"].end_all()
    one.run(200)
    assert not bench.manager._prefetches._rights._held


def test_a_right_is_one_engines_and_bounded():
    one, other, foreign = (FetchRights(4 << 20, lambda scope=scope: scope) for scope in ("s", "s", "t"))
    try:
        assert one.take(b"k", 0.0) is Turn.OWN
        assert other.take(b"k", 0.0) is Turn.ANOTHERS
        assert one.take(b"k", 0.0) is one.take(b"k", 60.0) is Turn.ANOTHERS, "of another prefetch of the same engine"
        assert foreign.take(b"k", 0.0) is Turn.OWN, "other values"
        one.release([b"k", b"unknown"])
        assert other.take(b"k", 1.0) is Turn.OWN
        for number in range(15):
            assert one.take(b"m%d" % number, 0.0) is Turn.OWN
        assert one.take(b"n", 0.0) is Turn.OWN
        assert one.take(b"o", 0.0) is Turn.LATER
    finally:
        for each in (one, other, foreign):
            each.release_all()
