"""What is known of the directory without a walk: the index, the reports, and whether a write fits."""

import threading

import pytest

from kvtiers.api import NotKept
from kvtiers_fs.paths import SHARDS
from kvtiers_fs.quota import Index, Ledger
from kvtiers_fs.waits import Waits

MIB = 1 << 20
HOUR = 3600.0


def ledger(capacity=128 * MIB, known=0, patience=0.01, **more):
    woken = []
    made = Ledger(capacity, known, lambda: woken.append(1), patience, **more)
    return made, woken


def claim(made, nbytes):
    made.claim(nbytes, made.waits_until())


def write(made, shard, nbytes):
    claim(made, nbytes)
    try:
        with made.changing(shard):
            made.count(shard, nbytes, 1)
    finally:
        made.settle(nbytes)


def test_an_index_comes_back_as_it_was_saved():
    index = Index()
    index.nbytes[3], index.values[3], index.counted[3] = 1 << 50, 7, 12.5
    index.next_count, index.cursor = 99.5, 255
    assert Index.decode(index.encode()) == index


@pytest.mark.parametrize("at", [0, 8, 20, 100, -1])
def test_an_index_with_one_wrong_byte_is_no_index(at):
    index = Index(values=[1] * SHARDS)
    content = bytearray(index.encode())
    content[at] ^= 1
    assert Index.decode(bytes(content)) == Index()
    assert Index.decode(index.encode() + b"x") == Index()


def test_shards_that_were_never_counted_are_taken_to_be_as_full_as_the_others():
    index = Index()
    for shard in range(64):
        index.nbytes[shard], index.values[shard], index.counted[shard] = 1000, 10, 1.0
    assert index.total() == (256_000, 2560)
    assert Index().total() == (0, 0)


def test_a_process_writes_no_more_than_a_step_without_a_report():
    made, woken = ledger()
    write(made, 1, MIB // 2)
    write(made, 2, MIB // 2)
    assert woken
    with pytest.raises(NotKept):
        claim(made, 1)
    assert [made.take().nbytes[shard] for shard in (1,)] == [MIB // 2]
    write(made, 3, MIB)


def test_a_write_that_lacks_a_report_alone_waits_longer_than_for_room_and_is_not_called_full(monkeypatch):
    made, _ = ledger(patience=5.0)
    write(made, 1, MIB)
    waits = []
    monkeypatch.setattr(made._changed, "wait_for", lambda _fits, seconds: waits.append(seconds))
    with pytest.raises(NotKept, match="are not reported to other processes yet") as refused:
        claim(made, 1)
    assert not refused.value.full
    full, _ = ledger(known=128 * MIB, patience=5.0)
    monkeypatch.setattr(full._changed, "wait_for", lambda _fits, seconds: waits.append(seconds))
    with pytest.raises(NotKept, match="no room: 128MiB of 128MiB are in use") as refused:
        claim(full, 1)
    assert refused.value.full
    assert waits[0] > waits[1]


def test_the_writes_of_one_call_wait_no_longer_than_one(monkeypatch):
    made, _ = ledger(patience=5.0)
    write(made, 1, MIB)
    waits = []
    monkeypatch.setattr(made._changed, "wait_for", lambda _fits, seconds: waits.append(seconds) or True)
    until = made.waits_until()
    made.claim(1, until)
    made.claim(1, until - 5.0)
    assert 0 < waits[0] <= 5.0
    assert waits[1] == 0


def test_one_value_is_always_written_however_large_beside_the_step():
    made, _ = ledger()
    write(made, 1, 100 * MIB)
    with pytest.raises(NotKept):
        claim(made, 1)


def test_writes_that_are_in_flight_count():
    made, _ = ledger()
    claim(made, MIB - 1)
    with pytest.raises(NotKept):
        claim(made, 2)
    claim(made, 1)
    made.settle(MIB - 1)
    claim(made, MIB - 1)


def test_a_write_waits_for_the_evictor_and_the_next_ones_do_not_wait_in_vain(monkeypatch):
    made, woken = ledger(known=128 * MIB, waits=Waits(refusals=100 * HOUR))
    waits, wait_for = [], made._changed.wait_for

    def wait(fits, seconds):
        waits.append(seconds)
        return wait_for(fits, 60.0 if len(waits) == 1 else 0.0)

    monkeypatch.setattr(made._changed, "wait_for", wait)
    writer = threading.Thread(target=claim, args=[made, MIB])
    writer.start()
    while not waits:
        writer.join(0.001)
    made.publish(0)
    writer.join()
    made.settle(MIB)
    made.publish(128 * MIB)
    for _ in range(50):
        with pytest.raises(NotKept, match="128MiB of 128MiB are in use"):
            claim(made, MIB)
    assert len(waits) == 2
    assert len(woken) == 51


def test_a_listing_counts_what_it_has_and_only_once():
    made, _ = ledger()
    write(made, 5, 4096)
    before = made.changes()
    assert made.was_counted(5, before[5])  # the value is on the disk, so the listing has it
    assert made.take().nbytes[5] == 0


def test_a_listing_says_nothing_of_a_shard_that_changed_meanwhile():
    made, _ = ledger()
    before = made.changes()
    write(made, 5, 4096)
    assert not made.was_counted(5, before[5])
    before = made.changes()
    with made.changing(5):
        assert not made.was_counted(5, before[5])  # on the disk, or not yet
    assert not made.was_counted(5, before[5])
    assert made.was_counted(6, before[6])
    assert made.take().nbytes[5] == 4096


def test_a_change_that_fails_is_over_too():
    made, _ = ledger()
    with pytest.raises(OSError, match="broken"), made.changing(5):
        raise OSError("broken")
    assert made.was_counted(5, made.changes()[5])
