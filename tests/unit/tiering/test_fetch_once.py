"""Prefetches of engines that start together: each chunk comes from the far tier once, whatever becomes of an engine.

With the near tier's lock file, and without one.
"""

import errno
import os

import pytest

from kvtiers.tiering.fetch_once import FetchRights, Turn
from kvtiers.tiering.machine_locks import FileLocks, SocketLocks

from .harness import Bench, chain
from .test_machine_locks import wait_opened
from .test_prefetch import warm

KEYS = chain("h", 40)


class Herd:
    """Engines with one near tier and one far tier, in the same state; a step of each in turn is a round."""

    def __init__(self, count, lock_file, *, hold=False):
        near = {"shareable": True, "lock_file": lock_file}
        self.benches = [
            Bench(rows=128, tiers={"near": near, "far": {"read_only": True}}, hold=hold) for _ in range(count)
        ]
        for bench in self.benches:
            bench.tier["near"].values = self.benches[0].tier["near"].values
            bench.tier["far"].values = self.benches[0].tier["far"].values
            rights = bench.manager._prefetches._rights
            rights._scope = lambda: f"test-{os.getpid()}-{id(self)}"
            rights._locks(lock_file, bench.clock.now)
        wait_opened()  # the clock of these tests does not go on meanwhile
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


@pytest.fixture(params=["a lock file", "no lock file"])
def lock_file(request, tmp_path):
    if request.param == "no lock file":
        return None
    (path := tmp_path / "file").touch()
    return path


@pytest.fixture
def herd(lock_file):
    herds = []

    def made(count, **more):
        herds.append(Herd(count, lock_file, **more))
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
    """Its locks are dropped by the kernel, as here by hand."""
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

        def none(self, name):
            raise OSError(errno.EMFILE, "none left")

        monkeypatch.setattr(FileLocks, "lock", none)
        monkeypatch.setattr(SocketLocks, "lock", none)
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


def take(rights, key, lock_file, now):
    """Take a right, when the lock file is open."""
    if rights._locks(lock_file, now) is None:
        wait_opened()
    return rights.take(key, lock_file, now)


def test_a_right_is_one_engines_and_bounded(lock_file):
    one, other, foreign = (FetchRights(4 << 20, lambda scope=scope: scope) for scope in ("s", "s", "t"))
    try:
        assert take(one, b"k", lock_file, 0.0) is Turn.OWN
        assert take(other, b"k", lock_file, 0.0) is Turn.ANOTHERS
        again = [take(one, b"k", lock_file, now) for now in (0.0, 60.0)]
        assert again == [Turn.ANOTHERS] * 2, "of another prefetch of the same engine"
        assert take(foreign, b"k", lock_file, 0.0) is Turn.OWN, "other values"
        one.release([b"k", b"unknown"])
        assert take(other, b"k", lock_file, 1.0) is Turn.OWN
        for number in range(15):
            assert take(one, b"m%d" % number, lock_file, 0.0) is Turn.OWN
        assert take(one, b"n", lock_file, 0.0) is Turn.OWN
        assert take(one, b"o", lock_file, 0.0) is Turn.LATER
    finally:
        for each in (one, other, foreign):
            each.release_all()


def test_rights_are_those_of_the_engines_that_share_the_near_tier(tmp_path):
    """Two directories with the same path in two containers have nothing of each other's."""
    (here := tmp_path / "here").touch()
    (there := tmp_path / "there").touch()
    one, other = FetchRights(4 << 20, lambda: "s"), FetchRights(4 << 20, lambda: "s")
    try:
        assert take(one, b"k", here, 0.0) is take(other, b"k", there, 0.0) is Turn.OWN
        assert take(one, b"l", there, 0.0) is Turn.OWN, "an engine's near tier may become another one"
        assert take(other, b"l", there, 0.0) is Turn.ANOTHERS
    finally:
        one.release_all()
        other.release_all()


def test_a_lock_file_that_cannot_be_used_gives_rights_as_without_one(tmp_path):
    missing = tmp_path / "missing"
    one, other = FetchRights(4 << 20, lambda: "s"), FetchRights(4 << 20, lambda: "s")
    try:
        locks = one._files[missing] = FileLocks(missing)
        with locks._handover:
            assert one.take(b"k", missing, 0.0) is Turn.LATER, "it is being opened"
        assert take(one, b"k", missing, 0.0) is Turn.OWN
        assert take(other, b"k", missing, 0.0) is Turn.ANOTHERS
        missing.touch()
        assert take(one, b"l", missing, 20.0) is Turn.OWN
        assert take(other, b"l", missing, 20.0) is Turn.ANOTHERS
        one.release([b"k", b"l"])
        assert take(other, b"l", missing, 20.0) is Turn.OWN
    finally:
        one.release_all()
        other.release_all()
