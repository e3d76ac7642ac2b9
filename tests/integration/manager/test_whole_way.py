"""The manager over real tiers of both kinds: a chunk's whole way, and what damage and mix-ups come to."""

import pytest

MEMORY = {"type": "memory", "capacity": "4MiB", "io": "thread"}
ASYNC = {"type": "memory-async", "max_blocks": 256}
TIERS = pytest.mark.parametrize("tiers", [[MEMORY], [ASYNC], [MEMORY, ASYNC]], ids=["store", "manager", "both"])


@TIERS
def test_what_was_stored_comes_back_from_below(start, keys, tiers):
    engine = start(*tiers)
    wanted = keys(12)
    engine.store(wanted)
    engine.forget()
    assert engine.load(keys(16)) == 12
    tier = engine.figures(tiers[0]["type"])
    assert tier["stored_chunks"] == tier["loaded_chunks"] == tier["hits"] == 12
    assert tier["stored_bytes"] == tier["loaded_bytes"] > 0
    assert tier["unread_bytes"] == 0
    assert tier["promotion_latency"]["count"] > 0


@TIERS
def test_other_weights_find_nothing_and_old_ones_stay_what_they_were(start, keys, tiers):
    engine = start(*tiers)
    wanted = keys(8)
    engine.store(wanted)
    engine.manager.set_weights_version("w2")
    engine.version = "w2"
    assert engine.load(wanted) == 0
    engine.store(wanted[:5])
    engine.forget()
    assert engine.load(wanted) == 5
    engine.manager.set_weights_version("w1")
    engine.version = ""
    assert engine.load(wanted) == 8, "the tiers still have them, under their own names"


def test_a_value_that_was_damaged_below_is_a_miss_and_says_so(start, keys, monkeypatch):
    from kvtiers_example.example_tier import ExampleSecondaryTier

    engine = start(ASYNC, rows=128)
    wanted = keys(8)
    engine.store(wanted)
    engine.forget()
    move = ExampleSecondaryTier._move

    def damage(tier, job):
        moved = move(tier, job)
        if job.values_to_write:
            row = tier._row(job.values_to_write[3][1])
            row[100] ^= 1
        return moved

    monkeypatch.setattr(ExampleSecondaryTier, "_move", damage)
    assert engine.load(wanted) == 3
    stats = engine.figures("memory-async")
    assert stats["failed_loads"] == 1
    assert stats["own"]["seal_failures"] == 1
    assert stats["out_of_use"] == 0


def test_two_engines_share_what_one_of_them_has_stored(start, keys, tmp_path):
    fs = {"type": "fs", "path": str(tmp_path), "capacity": "1GiB", "io": "thread"}
    first, second, other = start(fs), start(fs), start(fs, weights="w2")
    first.store(keys(10))
    assert second.load(keys(10)) == 10
    assert other.load(keys(10)) == 0


def test_a_hole_below_a_probed_hit_costs_the_rest_of_the_run_and_no_more(start, keys, monkeypatch, tmp_path):
    """A store that is expensive to ask is asked about few chunks; those below a hit count as hits."""
    from kvtiers_fs.store import FsStore

    monkeypatch.setattr(FsStore, "asks_one_by_one", True)
    fs = {"type": "fs", "path": str(tmp_path), "capacity": "1GiB", "io": "thread"}
    start(fs, rows=128).store(wanted := keys(24))
    (hole,) = [path for path in tmp_path.rglob("*") if wanted[5].hex() in path.name]
    hole.unlink()
    engine = start(fs, rows=128)
    assert engine.load(wanted) == 5
    assert engine.figures("fs")["failed_loads"] == 1
    assert engine.load(wanted) == 5, "and the failed load is remembered"
    assert engine.figures("fs")["failed_loads"] == 1
    engine.store(wanted[5:6])
    assert engine.load(wanted) == 24


def test_a_primary_that_is_too_small_costs_hits_and_nothing_else(start, keys):
    engine = start(MEMORY, ASYNC, rows=8)
    for number in range(20):
        engine.store(keys(4, f"n{number:02}-"))
    for number in range(20):
        assert engine.load(keys(4, f"n{number:02}-")) >= 2
    assert engine.manager.stats()["primary"]["misuse"] == 0
