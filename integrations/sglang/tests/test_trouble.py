"""Trouble: damaged values, tiers that hang or are not there, SGLang's own fault injector: a miss, and no raise."""

import time
from pathlib import Path

import pytest
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageFailureInjector, PoolName, PoolTransfer

from kvtiers.api import ConfigError

from .parts import mha_pool


def values(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "fs").rglob("*") if path.is_file() and path.stat().st_size >= 4096]


def test_a_damaged_page_is_a_miss_and_is_stored_again(serve, tmp_path):
    server = serve()
    keys, content = server.store(pages=4)
    stored = [path for path in values(tmp_path) if path.stat().st_size == 16_384]
    assert len(stored) == 4
    for path in stored[:2]:
        damaged = bytearray(path.read_bytes())
        damaged[1234] ^= 1
        path.write_bytes(damaged)
    found, got = server.load(keys)
    assert sorted(found) == [False, False, True, True]
    page = len(content) // 4
    for place, there in enumerate(found):
        assert (got[place * page :][:page] == content[place * page :][:page]) == there
    server.store(pages=4)
    assert server.load(keys) == ([True] * 4, content)
    assert server.backend.stats()["kv"]["tiers"]["fs"]["seal_failures"] == 2


def test_a_tier_that_cannot_be_opened_is_a_miss_until_it_is_there(serve, config, tmp_path):
    """A file where the folder is to be: the server starts, and its calls end."""
    (tmp_path / "fs").write_text("in the way")
    config["start_wait"] = "0s"
    config["secondary"][0]["breaker"] = {"delay": "10ms", "max_delay": "20ms"}
    server = serve()
    keys, slots = server.keys(2), server.take(2)
    assert server.backend.batch_set_v1(keys, slots) == [False, False]
    assert server.backend.batch_get_v1(keys, slots) == [False, False]
    assert server.backend.batch_exists(keys) == 0
    (tmp_path / "fs").unlink()
    until = time.monotonic() + 60
    while server.backend.batch_set_v1(keys, slots) != [True, True]:
        assert time.monotonic() < until
    assert server.load(keys)[0] == [True, True]


def test_a_tier_that_hangs_uses_up_the_deadline_of_a_call_and_no_more(serve, config, unanswered):
    config["start_wait"] = "0s"
    config["secondary"] = [{"type": "redis", "url": f"redis://127.0.0.1:{unanswered}/0"}]
    server = serve(deadline="300ms")
    keys, slots = server.keys(2), server.take(2)
    for call, nothing in (
        (lambda: server.backend.batch_exists(keys), 0),
        (lambda: server.backend.batch_get_v1(keys, slots), [False, False]),
        (lambda: server.backend.batch_set_v1(keys, slots), [False, False]),
    ):
        begin = time.monotonic()
        assert call() == nothing
        assert time.monotonic() - begin < 18, "without its own deadline it would be 20 s"


def test_calls_about_several_pools_share_one_deadline_and_so_does_the_close(serve, config, redis_server):
    """Four pools over a store that has stopped: a call takes five seconds, not twenty, and so does the close."""
    config["secondary"] = [{"type": "redis", "url": redis_server.url, "processes": 1}]
    names = ["kv", "swa", "draft", "draft_swa"]  # SGLang makes all of them of one class
    server = serve(mha_pool(), sidecars={name: mha_pool() for name in names[1:]}, deadline="5s")
    keys = server.keys(1)
    transfers = [PoolTransfer(name=PoolName(name), keys=keys, host_indices=server.take(1, name)) for name in names]
    until = time.monotonic() + 60
    while server.backend.batch_set_v2(transfers) != {name: [True] for name in names}:
        assert time.monotonic() < until
    with redis_server.stopped():
        for call in (server.backend.batch_get_v2, server.backend.batch_set_v2):
            for transfer in transfers:
                transfer.keys = server.keys(1, seed=1)  # that a page is there is remembered
            begin = time.monotonic()
            assert call(transfers)["draft"] == [False]
            assert 4.9 < time.monotonic() - begin < 18
        begin = time.monotonic()
        server.close()
        assert time.monotonic() - begin < 18


def test_no_mistake_of_a_caller_raises(serve, caplog):
    server = serve()
    keys, slots = server.keys(2), server.take(2)
    assert server.backend.batch_get_v1(keys, slots[:-1]) == [False, False]
    assert server.backend.batch_set_v1(keys, None) == [False, False]
    assert server.backend.batch_exists(None) == 0
    assert server.backend.get(keys[0]) is None
    assert server.backend.batch_get(keys) == [None, None]
    assert not server.backend.set(keys[0], slots)
    assert not server.backend.batch_set(keys, [slots])
    server.backend.clear()
    assert server.backend.bugs == 3
    server.backend.close()
    assert server.backend.batch_exists(keys) == 0
    assert server.backend.batch_get_v1(keys, slots) == [False, False]
    assert "'kvtiers store bump'" in caplog.text  # lines are written by a thread, which the close waits for


@pytest.mark.parametrize("probability", ["0.5", "1.0"])
def test_with_sglangs_own_fault_injector_pages_are_missed_and_never_wrong(serve, monkeypatch, probability):
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", probability)
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.01")
    server = serve()
    assert isinstance(server.backend, HiCacheStorageFailureInjector)
    found = []
    for seed in range(300):
        keys, slots = server.keys(2, seed), server.take(2)
        content = server.fill(slots, seed)
        stored = server.backend.batch_set_v1(keys, slots)
        server.pool.free(slots)
        there, got = server.load(keys)
        assert stored == [True, True] or there == [False, False]
        assert there == [False, False] or got == content
        found += there
        if seed > 10 and (probability == "1.0" or any(found)):
            break  # a few rounds, and at an even chance of each call as many as it takes until one finds its pages
    assert any(found) == (probability == "0.5")


def test_a_config_that_is_wrong_stops_the_attach_with_its_line(serve, config):
    config["secondary"][0]["type"] = "no-such-tier"
    with pytest.raises(ConfigError, match="no-such-tier"):
        serve()
