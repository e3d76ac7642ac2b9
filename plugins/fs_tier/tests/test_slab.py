"""One slab: its files, its limits, and what damage, a full disk, and other hands in its directory do to it."""

import json
import os
import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtiers.api import ConfigError, NotKept, TierContext, TierUnavailable
from kvtiers.layout.namespace_epoch import read_epoch, write_epoch
from kvtiers.plugins import load_tier
from kvtiers_fs.config import FsConfig
from kvtiers_fs.plugin import FIGURES
from kvtiers_fs.slab.evictor import SlabEvictor
from kvtiers_fs.slab.format import PAGE, SLAB_FORMAT, Dead, Entry, Header, NameRecord, Row, digest_of, name_records
from kvtiers_fs.slab.index import INDEX_FILE
from kvtiers_fs.slab.store import SlabStore

CAPACITY = 1 << 20
SEGMENT = CAPACITY // 8
GOLDEN = json.loads(Path(__file__).with_name("slab-1.json").read_text())


def fill(store, value, count, first=0):
    """Write so many values of a page, each with its number's byte, and return their names."""
    names = [f"ns/m/{number:064x}" for number in range(first, first + count)]
    for number, name in enumerate(names, start=first):
        store.write(name, value(number % 251))
    return names


def values_file(folder) -> Path:
    (path,) = folder.path.glob("slab-*.values")
    return path


# -- the format


def test_every_byte_of_the_format_is_as_it_was():
    header = Header(0x0123ABCD, 16 << 20, 128, 254)
    assert GOLDEN["format"] == SLAB_FORMAT
    assert digest_of(GOLDEN["name"]).hex() == GOLDEN["digest"]
    entry = Entry(digest_of(GOLDEN["name"]), 1_700_000_001, 7, 1, 5, 8192, 1_700_000_002)
    record = NameRecord(1_700_000_001, 5, 8192, 1_700_000_002, GOLDEN["name"])
    found = {
        "header": header.encode(),
        "entry": entry.encode(),
        "row": Row(1_700_000_001, 1_600_000_000, 1_700_000_003, 2, 7, 200, 16384).encode(),
        "dead": Dead(1_700_000_001, 1, 8192).encode(),
        "name_record": record.encode(),
    }
    assert {what: data.hex() for what, data in found.items()} == GOLDEN["records"]
    assert [header.dead_at, header.buckets_at, header.index_bytes] == GOLDEN["places"]
    assert Header.decode(bytes.fromhex(GOLDEN["records"]["header"])) == header
    assert Entry.decode(bytes.fromhex(GOLDEN["records"]["entry"]), 0) == entry
    assert list(name_records(bytes.fromhex(GOLDEN["records"]["name_record"]) * 2, record.edition)) == [record] * 2


def test_a_value_lies_in_its_segment_byte_for_byte(slab_folder, value):
    store = slab_folder.open(CAPACITY)
    store.write("ns/a", value(1, pages=2))
    store.write("ns/b", value(2))
    content = values_file(slab_folder).read_bytes()
    assert len(content) == SEGMENT
    assert content[: 3 * PAGE] == bytes(value(1, pages=2)) + bytes(value(2))


def test_a_slab_of_another_format_starts_cold_and_is_used(slab_folder, read, value, caplog):
    slab_folder.open(CAPACITY).write("ns/a", value(1))
    slab_folder.close()
    index = slab_folder.path / INDEX_FILE
    index.write_bytes(index.read_bytes().replace(b"kvtSLAB", b"kvtSLAX"))
    assert slab_folder.open(CAPACITY, read_only=True).exists(["ns/a"]) == [False]
    store = slab_folder.open(CAPACITY)
    assert "the cache is cold" in caplog.text
    assert read(store, "ns/a") is None
    store.write("ns/a", value(2))
    assert read(store, "ns/a") == bytes(value(2))


# -- room


def test_the_capacity_is_kept_and_what_was_written_last_is_there(slab_folder, read, value):
    store = slab_folder.open(CAPACITY)
    names = fill(store, value, 1000)
    assert slab_folder.segments() == 8
    there = store.exists(names)
    assert 6 * SEGMENT // PAGE <= sum(there) <= CAPACITY // PAGE
    assert all(there[-6 * SEGMENT // PAGE :])
    slab_folder.settle(store)
    figures = store.stats()
    assert set(figures) == set(FIGURES)
    # The spare segment is made by the thread, at any time.
    assert figures["values"] + figures["evicted_values"] == 1000
    assert figures["segments"] == 8
    assert sorted(entry.name for entry in store.list("")) == [
        name for name, is_there in zip(names, store.exists(names), strict=True) if is_there
    ]


def test_values_that_are_read_stay_when_others_of_their_age_go(slab_folder, read, value):
    store = slab_folder.open(CAPACITY)
    names = fill(store, value, 32)
    kept = names[:4]
    for turn in range(1, 20):
        assert [read(store, name) for name in kept] == [bytes(value(number)) for number in range(4)]
        fill(store, value, 32, first=1000 * turn)
        slab_folder.settle(store)  # as its thread does when a segment is full
    assert all(store.exists(kept))
    assert not any(store.exists(names[4:]))
    assert store.stats()["kept_values"] >= 4


def test_a_segment_whose_values_are_all_deleted_is_used_again_before_others_go(slab_folder, value):
    store = slab_folder.open(CAPACITY)
    first = fill(store, value, 32)
    gone = fill(store, value, 32, first=32)
    rest = fill(store, value, 5 * 32, first=64)
    store.delete(gone)
    fill(store, value, 32, first=1000)
    assert slab_folder.segments() == 7
    assert all(store.exists(first + rest))
    assert store.stats()["evicted_values"] == 0


def test_a_value_larger_than_a_segment_is_dropped_and_the_limit_named(slab_folder, value):
    store = slab_folder.open(CAPACITY)
    with pytest.raises(NotKept, match="a value of 132KiB is larger than a segment, which has 128KiB"):
        store.write("ns/a", value(1, pages=33))
    assert store.stats()["dropped_values"] == 1


def test_a_smaller_capacity_gives_segments_back_to_the_disk(slab_folder, value):
    names = fill(slab_folder.open(CAPACITY), value, 7 * 32)
    slab_folder.close()
    store = slab_folder.open(CAPACITY // 2)
    slab_folder.settle(store)
    assert slab_folder.segments() == 4
    assert all(store.exists(names[-2 * 32 :]))
    assert not any(store.exists(names[: 3 * 32]))


def test_below_the_free_space_floor_segments_are_given_back_and_none_is_made(slab_folder, value, monkeypatch):
    store = slab_folder.open(CAPACITY, min_free="1GiB")
    names = fill(store, value, 3 * 32)
    monkeypatch.setattr("kvtiers_fs.slab.evictor.free_bytes", lambda _fd: (1 << 30) - SEGMENT)
    monkeypatch.setattr("kvtiers_fs.slab.segments.free_bytes", lambda _fd: (1 << 30) - SEGMENT)
    slab_folder.settle(store)
    assert slab_folder.segments() == 2
    assert store.exists(names) == [False] * 32 + [True] * 64
    fill(store, value, 200, first=1000)
    assert slab_folder.segments() == 2


def test_a_value_that_was_not_used_for_its_age_is_absent_and_then_gone(slab_folder, read, value, monkeypatch):
    now = 2_000_000_000.0
    monkeypatch.setattr("time.time", lambda: now)
    store = slab_folder.open(CAPACITY, max_age="10s")
    store.write("ns/a", value(1))
    store.write("ns/b", value(2))
    now += 8
    assert read(store, "ns/b") == bytes(value(2))
    now += 4
    assert store.exists(["ns/a", "ns/b"]) == [False, True]
    assert read(store, "ns/a") is None
    now += 20
    store._evictor._next_sweep = 0.0
    slab_folder.settle(store)
    assert store.stats()["expired_values"] == 2
    assert store.stats()["values"] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root")
def test_a_full_disk_drops_writes_and_what_is_there_is_read(slab_folder, read, value, tmp_path):
    point = tmp_path / "disk"
    point.mkdir()
    if os.system(f"mount -t tmpfs -o size=1m none {point} 2>/dev/null"):
        pytest.skip("this container may not mount")
    try:
        slab_folder.path = point / "values"
        with (point / "others").open("wb") as others:
            others.write(bytes(700 << 10))
        store = slab_folder.open(CAPACITY)
        first = fill(store, value, 16)
        assert all(store.exists(first))
        # The disk has no room for another segment, so the one that there is is used again.
        last = fill(store, value, 200, first=100)
        assert slab_folder.segments() == 1
        assert store.exists(last[-1:]) == [True]
        assert read(store, last[-1]) == bytes(value(299 % 251))
    finally:
        slab_folder.close()
        os.system(f"umount {point}")


def test_a_disk_without_room_for_the_first_segment_drops_writes(slab_folder, value, monkeypatch):
    store = slab_folder.open(CAPACITY)
    monkeypatch.setattr("kvtiers_fs.slab.segments.allocate", _no_space)
    with pytest.raises(NotKept, match="no room"):
        store.write("ns/a", value(1))
    assert slab_folder.segments() == 0
    monkeypatch.undo()
    store.write("ns/a", value(1))


def test_a_file_system_that_has_become_read_only_refuses_writes_and_is_read(slab_folder, read, value, monkeypatch):
    store = slab_folder.open(CAPACITY)
    store.write("ns/a", value(1))

    def refuse(*_args):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "pwritev", refuse)
    with pytest.raises(NotKept, match="has become read-only"):
        store.write("ns/b", value(2))
    assert read(store, "ns/a") == bytes(value(1))
    assert store.stats()["dropped_values"] == 1


def test_each_value_of_a_batch_that_a_full_disk_drops_is_counted(slab_folder, value, monkeypatch):
    store = slab_folder.open(CAPACITY)
    write, calls = os.pwritev, []

    def fail_second(*args):
        calls.append(args)
        return write(*args) if len(calls) == 1 else _no_space()

    monkeypatch.setattr(os, "pwritev", fail_second)
    answers = store.write_many([f"ns/{number}" for number in range(40)], [[value(number)] for number in range(40)])
    assert [answer is None for answer in answers] == [True] * 32 + [False] * 8  # 32 values fill a segment
    assert store.stats()["dropped_values"] == 8


def _no_space(*_args):
    raise OSError(28, "No space left on device")


def test_values_of_a_batch_lie_behind_each_other_and_are_read_so(slab_folder, value, monkeypatch):
    store = slab_folder.open(CAPACITY)
    names, calls = [f"ns/{number}" for number in range(48)], []
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda fd, views, at, real=real, name=name: (calls.append(name), real(fd, views, at))[1]
        )
    assert store.write_many(names, [[value(number)] for number in range(48)]) == [None] * 48
    back = [value(0) for _ in names]
    assert store.read_many_into(names, [[view] for view in back]) == [4096] * 48
    assert [bytes(view) for view in back] == [bytes(value(number)) for number in range(48)]
    # 32 values fill a segment.
    assert calls == ["pwritev", "pwritev", "preadv", "preadv"]


def test_a_value_of_a_batch_that_is_too_large_is_refused_alone(slab_folder, value):
    store = slab_folder.open(CAPACITY)
    kept = store.write_many(["ns/a", "ns/b", "ns/c"], [[value(1)], [value(2, pages=33)], [value(3)]])
    assert kept[0] is kept[2] is None
    assert isinstance(kept[1], NotKept)
    assert not kept[1].full
    assert "larger than a segment, which has 128KiB" in kept[1].reason  # to make room on the disk would not help
    with pytest.raises(NotKept, match="larger than a segment"):
        store.write("ns/b", value(2, pages=33))
    assert store.exists(["ns/a", "ns/b", "ns/c"]) == [True, False, True]


def test_threads_that_open_a_segment_past_the_page_cache_at_once_use_one_descriptor(slab_folder, value):
    """Or one of them would go on with a number that is closed, and soon another file's."""
    store = slab_folder.open(CAPACITY)
    store.write("ns/a", value(1))
    row = store.slab.index.row(0)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(50):
            store.slab.segments._files.clear()
            file, start = store.slab.segments.file(0, row.birth), threading.Barrier(8)
            found = list(pool.map(lambda _, file=file, start=start: (start.wait(), file.direct)[1], range(8)))
            assert len(set(found)) == 1
            os.fstat(found[0])


# -- the records of core's own


def _write_much(store, value, settle):
    for number in range(200):
        store.write(f"ns/m/{number:064x}", value(number, pages=16))
        if number % 4 == 3:
            settle()


@pytest.mark.parametrize("keeps_up", [True, False])
def test_the_epoch_of_a_namespace_outlives_turnovers_of_the_capacity(slab_folder, value, monkeypatch, keeps_up):
    store = slab_folder.open(4 << 20)
    if not keeps_up:
        monkeypatch.setattr(store._evictor, "round", lambda: None)
    write_epoch(store, "ns", "0123456789abcdef")
    _write_much(store, value, store._evictor.round)
    assert slab_folder.segments() == 8
    assert sum(entry.name.startswith("ns/m/") for entry in store.list("")) < 64
    assert read_epoch(store, "ns") == "0123456789abcdef"


def test_the_epoch_of_a_namespace_outlives_a_smaller_capacity(slab_folder, value):
    store = slab_folder.open(4 << 20)
    write_epoch(store, "ns", "0123456789abcdef")
    for number in range(48):
        store.write(f"ns/m/{number:064x}", value(number, pages=16))
    slab_folder.close()
    store = slab_folder.open(2 << 20)
    slab_folder.settle(store)
    assert slab_folder.segments() == 4
    assert read_epoch(store, "ns") == "0123456789abcdef"


@pytest.mark.parametrize("why", ["no room", "the end"])
def test_a_segment_whose_epoch_could_not_be_copied_is_not_evicted(slab_folder, value, monkeypatch, why):
    store = slab_folder.open(4 << 20)
    monkeypatch.setattr(store._evictor, "round", lambda: None)
    write_epoch(store, "ns", "0123456789abcdef")
    _write_much(store, value, lambda: None)
    if why == "the end":
        store._evictor._stopping = True
    else:
        monkeypatch.setattr(store._evictor, "_move", _no_segment)
    for _ in range(3):
        SlabEvictor.round(store._evictor)
    assert read_epoch(store, "ns") == "0123456789abcdef"


def _no_segment(*_args):
    raise NotKept("no room")


# -- damage, and other hands


def test_an_index_that_another_process_has_made_again_is_not_removed(slab_folder, read, value, monkeypatch):
    slab_folder.open(CAPACITY).write("ns/old", value(1))
    slab_folder.close()
    decode, others = Header.decode, []

    def damaged(_data):
        monkeypatch.setattr(Header, "decode", decode)
        (slab_folder.path / INDEX_FILE).unlink()
        others.append(slab_folder.open(CAPACITY))
        others[0].write("ns/new", value(2))

    monkeypatch.setattr(Header, "decode", damaged)
    store = slab_folder.open(CAPACITY)
    assert not others[0]._slab.index.is_removed()
    assert read(store, "ns/new") == bytes(value(2))


def test_damage_to_the_index_is_a_miss_and_never_another_value(slab_folder, read, value):
    names = fill(slab_folder.open(CAPACITY), value, 100)
    slab_folder.close()
    index = slab_folder.path / INDEX_FILE
    whole, choice = index.read_bytes(), random.Random(3)
    used = [at for at in range(PAGE, len(whole)) if whole[at]]
    missed = 0
    for _ in range(30):
        damaged = bytearray(whole)
        for at in choice.sample(used, 5):
            damaged[at] ^= 1 << choice.randrange(8)
        index.write_bytes(damaged)
        store = SlabStore(FsConfig(type="fs", path=slab_folder.path, capacity=CAPACITY, layout="slab"), read_only=True)
        for number, name in enumerate(names):
            found = read(store, name)
            missed += found is None
            assert found in {None, bytes(value(number))}
        store.close()
    assert missed > 30


def test_an_entry_of_an_earlier_use_of_its_segment_leads_nowhere(slab_folder, read, value):
    """As one that a power cut brings back."""
    store = slab_folder.open(CAPACITY)
    (name,) = fill(store, value, 1)
    entry = store.slab.index.find(digest_of(name))
    fill(store, value, 1000, first=1)
    with store.slab.index.locked():
        store.slab.index.insert([entry])
    assert store.exists([name]) == [False]
    assert read(store, name) is None


def test_a_segment_that_is_used_again_while_a_value_is_read_is_a_miss(slab_folder, read, value, monkeypatch):
    store = slab_folder.open(CAPACITY)
    (name,) = fill(store, value, 1)
    slab_folder.settle(store)
    preadv = os.preadv

    def slowly(fd, views, at):
        monkeypatch.setattr(os, "preadv", preadv)
        fill(store, value, 1000, first=1)
        return preadv(fd, views, at)

    monkeypatch.setattr(os, "preadv", slowly)
    assert read(store, name) is None


def test_a_list_of_names_that_is_damaged_ends_there_and_values_are_found(slab_folder, read, value):
    names = fill(slab_folder.open(CAPACITY), value, 10)
    slab_folder.close()
    (path,) = slab_folder.path.glob("slab-*.names")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    store = slab_folder.open(CAPACITY)
    assert 4 <= len(list(store.list(""))) < 10
    assert [read(store, name) for name in names] == [bytes(value(number)) for number in range(10)]


@pytest.mark.parametrize("what", ["removed", "cut short"])
def test_values_whose_segment_is_lost_are_misses_and_absent_from_then_on(slab_folder, read, value, what):
    store = slab_folder.open(CAPACITY)
    (name,) = fill(store, value, 1)
    slab_folder.close()
    path = values_file(slab_folder)
    path.unlink() if what == "removed" else os.truncate(path, 0)
    store = slab_folder.open(CAPACITY)
    assert read(store, name) is None
    assert store.exists([name]) == [False]
    store.write(name, value(5))
    assert read(store, name) == bytes(value(5))


def test_a_directory_that_is_removed_while_it_is_in_use_is_made_again(slab_folder, read, value):
    store = slab_folder.open(CAPACITY)
    store.write("ns/a", value(1))
    shutil.rmtree(slab_folder.path)
    assert store.exists(["ns/a"]) == [False]
    store.write("ns/b", value(2))
    assert read(store, "ns/b") == bytes(value(2))
    assert slab_folder.open(CAPACITY).exists(["ns/a", "ns/b"]) == [False, True]


def test_what_killed_processes_left_beside_the_slab_is_removed(slab_folder, value):
    store = slab_folder.open(CAPACITY)
    store.write("ns/a", value(1))
    left = [slab_folder.path / name for name in ("slab-00000001-00000002.values", ".tmp-index-1")]
    new = slab_folder.path / "slab-00000001-00000003.values"
    for path in [*left, new]:
        path.write_bytes(b"x")
    for path in left:
        os.utime(path, (1, 1))
    store._evictor._next_sweep = 0.0
    slab_folder.settle(store)
    assert not any(path.exists() for path in left)
    assert new.exists()
    assert store.stats()["reclaimed_files"] == 2
    assert store.exists(["ns/a"]) == [True]


# -- what is refused


@pytest.mark.parametrize(("there", "wanted"), [("files", "slab"), ("slab", "files")])
def test_a_directory_of_the_other_layout_is_refused_with_what_to_do(folder, slab_folder, value, there, wanted):
    folder.path = slab_folder.path
    {"files": folder, "slab": slab_folder}[there].open().write("ns/a", value(1))
    line = f"has the layout '{there}', the config has '{wanted}': set 'layout: {there}' .* cold"
    with pytest.raises(ConfigError, match=line):
        {"files": folder, "slab": slab_folder}[wanted].open()


def test_a_capacity_of_too_few_values_is_refused(tmp_path):
    plugin = load_tier("fs")
    config = FsConfig(type="fs", path=tmp_path / "values", capacity="15MiB", layout="slab")
    region = memoryview(bytearray(PAGE))
    context = TierContext(
        tier_name="disk", value_bytes=2 << 20, row_stride=2 << 20, namespace="ns", read_only=False, region=region
    )
    with pytest.raises(ConfigError, match=r"no room for 8 segments .* or 'layout: files'"):
        plugin.open(config, context)
    assert not (tmp_path / "values").exists()


def test_a_network_file_system_is_refused(slab_folder, tmp_path, monkeypatch):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"1 1 8:1 / / rw - ext4 none rw\n2 1 8:1 / {tmp_path} rw - nfs4 server rw\n")
    monkeypatch.setattr("kvtiers_fs.diagnosis._MOUNTS", mounts)
    with pytest.raises(ConfigError, match=r"is on nfs4, mounted at .* set 'layout: files'"):
        slab_folder.open()


def test_a_read_only_store_changes_nothing_and_finds_what_comes(slab_folder, read, value):
    slab_folder.path.mkdir(0o700)
    reader = slab_folder.open(CAPACITY, read_only=True)
    assert reader.exists(["ns/a"]) == [False]
    assert list(slab_folder.path.iterdir()) == []
    writer = slab_folder.open(CAPACITY)
    writer.write("ns/a", value(1))
    before = (slab_folder.path / INDEX_FILE).read_bytes()
    assert read(reader, "ns/a") == bytes(value(1))
    assert [entry.name for entry in reader.list("ns/")] == ["ns/a"]
    assert (slab_folder.path / INDEX_FILE).read_bytes() == before
    with pytest.raises(PermissionError):
        reader.write("ns/b", value(1))
    with pytest.raises(PermissionError):
        reader.delete(["ns/a"])


def test_a_file_system_that_cannot_have_the_index_takes_the_tier_away_with_one_line(slab_folder, monkeypatch):
    monkeypatch.setattr("kvtiers_fs.slab.index.allocate", _no_space)
    with pytest.raises(TierUnavailable, match="No space left"):
        slab_folder.open()
