"""Sentinels: the master that they name is the one that is used, also after a failover."""

import threading

import pytest
from redis_servers import Sentinels, wait_until

BYTES = 16384


def content_of(name: str) -> bytes:
    return (name.encode() * (BYTES // len(name) + 1))[:BYTES]


def read_all(store, many) -> list[bytes | None]:
    backs = [memoryview(bytearray(BYTES)) for _ in many]
    found = store.read_many_into(many, backs)
    return [bytes(back) if there else None for back, there in zip(backs, found, strict=True)]


def write_all(store, many) -> list[bool]:
    return list(store.write_many(many, [memoryview(content_of(name)) for name in many]))


def opened(tier, sentinels, **options):
    return tier.open(sentinels.url, topology="sentinel", master=sentinels.name, **options)


def test_a_master_that_they_do_not_know_is_said_so(tier, shared_sentinels):
    with pytest.raises(Exception, match="'other'"):
        tier.open(shared_sentinels.url, topology="sentinel", master="other")


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_a_failover_under_load_yields_no_wrong_byte_and_ends(tier, start, names, how):
    sentinels = start(Sentinels)
    store = opened(tier, sentinels, timeout="500ms", connect_timeout="500ms")
    many = names(32)
    assert all(write_all(store, many))
    wrong, stop = [], threading.Event()

    def load() -> None:
        while not stop.is_set():
            try:
                write_all(store, many)
                found = read_all(store, many)
            except type(store).transient_errors:
                continue
            wrong.extend(name for name, got in zip(many, found, strict=True) if got not in {None, content_of(name)})

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        getattr(sentinels.master, how)()
        wait_until(lambda: sentinels.replica.has_role("master"), "the replica takes over")
        wait_until(lambda: works(store, many), "the tier works again")
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert not wrong
    assert sentinels.replica.call("DBSIZE") >= len(many)


def works(store, many) -> bool:
    try:
        return all(write_all(store, many)) and read_all(store, many) == [content_of(name) for name in many]
    except type(store).transient_errors:
        return False


def test_a_master_that_was_demoted_and_lives_on_is_left(tier, start, names):
    sentinels = start(Sentinels)
    store = opened(tier, sentinels)
    many = names(4)
    assert all(write_all(store, many))
    sentinels.sentinels[0].call("SENTINEL FAILOVER", sentinels.name)
    wait_until(lambda: sentinels.master.has_role("slave"), "the master is a replica now")
    wait_until(lambda: works(store, many), "the tier writes to the new one")


def test_a_sentinel_that_is_gone_is_passed_over(tier, start, names):
    sentinels = start(Sentinels)
    sentinels.sentinels[0].kill()
    store = opened(tier, sentinels)
    assert all(write_all(store, names(2)))
