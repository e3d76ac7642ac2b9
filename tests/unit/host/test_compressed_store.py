"""A tier with compression: its values come back, whether they were stored with it or without, or they are misses."""

import random
import subprocess
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest
from tests.stores import DictStore

from kvtiers.api import StoreContractError, make_offload_key
from kvtiers.host.compressed_store import CompressedStore, compressed_store
from kvtiers.host.messages import Status
from kvtiers.host.transfer import MoverOptions, ValueMover
from kvtiers.host.value_run import ValueRun
from kvtiers.layout.borrowed_views import ValueViews
from kvtiers.layout.compressed_value import ValueCompressor, is_compressed
from kvtiers.layout.seal import PlainSeal
from kvtiers.layout.storage_name import StorageNames
from kvtiers.testing import ChunkStoreTests
from kvtiers_example.memory_store import MemoryStore
from kvtiers_fs.config import FsConfig
from kvtiers_fs.store import FsStore

VALUE = 96 << 10
PAYLOAD = VALUE - 100
NAMES = StorageNames("test/model-0123456789abcdef01234567/", bytes(range(8)))
KEYS = [make_offload_key(number.to_bytes(32, "big"), 0) for number in range(6)]
DONE, PRESENT, MISSING = Status.DONE, Status.PRESENT, Status.MISSING
CORRUPT, FAILED = Status.CORRUPT, Status.FAILED


class BatchStore(DictStore):
    """A store in a dict that moves several values at a time."""

    batch_values = 32
    batches = 0

    def read_many_into(self, names, dsts):
        return [self.read_into(name, dst) for name, [dst] in zip(names, dsts, strict=True)]

    def write_many(self, names, srcs):
        self.batches += 1
        for name, [src] in zip(names, srcs, strict=True):
            self.write(name, src)
        return [None] * len(names)


def payload(number):
    numbers = np.random.default_rng(number).standard_normal(PAYLOAD // 2, np.float32)
    return (numbers.view(np.uint32) >> 16).astype("<u2").tobytes()


class Rows:
    """Rows of a region, and a mover over them for each kind of tier."""

    def __init__(self):
        self.memory = memoryview(bytearray(len(KEYS) * VALUE))
        self.views = ValueViews(self.memory, VALUE)

    def mover(self, store, compression="zstd", **options):
        store = compressed_store(store, compression)
        return ValueMover(store, self.views, MoverOptions([(PAYLOAD, VALUE)], **options), threading.Event())

    def fill(self):
        for row in range(len(KEYS)):
            self.memory[row * VALUE : row * VALUE + PAYLOAD] = payload(row)

    def poison(self):
        self.memory[:] = b"\xdb" * len(self.memory)

    def holds(self, row):
        return self.memory[row * VALUE : row * VALUE + PAYLOAD] == payload(row)


@pytest.fixture
def rows():
    return Rows()


def run(**more):
    return ValueRun(NAMES, KEYS, range(len(KEYS)), time.monotonic() + 30, **more)


def stored(rows, store, compression="zstd"):
    rows.fill()
    moved = rows.mover(store, compression).store(run())
    assert set(moved.statuses) == {DONE}
    rows.poison()
    return moved


def loaded(rows, store, compression="zstd"):
    """What a load of all brings: statuses; no wrong byte ever."""
    rows.poison()
    moved = rows.mover(store, compression).load(run())
    for row, status in enumerate(moved.statuses):
        assert status != DONE or rows.holds(row), "wrong bytes"
    return list(moved.statuses)


@pytest.mark.parametrize("kind", [DictStore, BatchStore])
def test_values_are_stored_compressed_and_come_back(rows, kind):
    store = kind()
    moved = stored(rows, store)
    assert moved.nbytes == len(KEYS) * VALUE, "a load's time is compared with the bytes of KV"
    assert all(is_compressed(memoryview(value)) for value in store.values.values())
    assert len(KEYS) * VALUE / sum(map(len, store.values.values())) > 1.35
    assert all(len(value) % 4096 == 0 for value in store.values.values())
    assert loaded(rows, store) == [DONE] * len(KEYS)
    assert kind is DictStore or store.batches == 1


@pytest.mark.parametrize("kind", [DictStore, BatchStore])
def test_a_value_that_lies_in_two_places_is_compressed_in_one_piece(rows, kind):
    """As in an epoch, whose seal lies beside the row."""
    store, options = kind(), MoverOptions([(PAYLOAD, VALUE)])
    seal = PlainSeal("0123456789abcdef")
    mover = ValueMover(compressed_store(store, "zstd"), rows.views, options, threading.Event(), seal)
    rows.fill()
    assert set(mover.store(run()).statuses) == {DONE}
    assert all(is_compressed(memoryview(value)) for value in store.values.values())
    rows.poison()
    assert set(mover.load(run()).statuses) == {DONE}
    assert all(rows.holds(row) for row in range(len(KEYS)))


@pytest.mark.parametrize(("writes", "reads"), [("none", "zstd"), ("zstd", "read"), ("read", "zstd"), ("none", "read")])
@pytest.mark.parametrize("kind", [DictStore, BatchStore])
def test_what_was_stored_before_the_option_was_changed_is_found(rows, kind, writes, reads):
    store = kind() if writes != "none" else DictStore()
    stored(rows, store, writes)
    assert all(is_compressed(memoryview(value)) == (writes == "zstd") for value in store.values.values())
    if kind is BatchStore:
        store.__class__ = BatchStore
    assert loaded(rows, store, reads) == [DONE] * len(KEYS)


def test_without_the_option_a_compressed_value_is_a_miss_and_the_next_store_replaces_it(rows):
    store = DictStore()
    stored(rows, store)
    assert loaded(rows, store, "none") == [MISSING] * len(KEYS)
    assert len(store.values) == len(KEYS), "foreign, and not ours to delete"
    rows.fill()
    moved = rows.mover(store, "none").store(run(overwrites=bytes([1] * len(KEYS))))
    assert set(moved.statuses) == {DONE}
    assert loaded(rows, store, "none") == loaded(rows, store) == [DONE] * len(KEYS)


def test_what_does_not_become_shorter_is_stored_as_it_is(rows):
    store = BatchStore()
    rows.fill()
    noise = np.random.default_rng(9).bytes(PAYLOAD)
    rows.memory[VALUE : VALUE + PAYLOAD] = noise
    mover = rows.mover(store)
    assert set(mover.store(run()).statuses) == {DONE}
    assert [len(store.values[name]) == VALUE for name in NAMES.names(KEYS)] == [False, True, *[False] * 4]
    rows.poison()
    assert set(mover.load(run()).statuses) == {DONE}
    assert rows.memory[VALUE : VALUE + PAYLOAD] == noise
    figures = mover._store.stats()
    assert figures["compression_values"] == 6
    assert figures["compression_unchanged_values"] == 1
    assert figures["compression_value_bytes"] == 6 * VALUE
    assert figures["compression_stored_bytes"] == sum(map(len, store.values.values()))


def test_damage_is_a_miss_that_is_counted_and_deleted_and_another_format_is_left_alone(rows):
    store = DictStore()
    stored(rows, store)
    one, other, cut, seal = NAMES.names(KEYS[:4])
    store.values[one] = store.values[one][:5000] + b"\xff" + store.values[one][5001:]
    store.values[other] = store.values[other][:8] + b"\2" + store.values[other][9:]
    store.values[cut] = store.values[cut][:4096]
    store.values[seal] = store.values[NAMES.name(KEYS[4])]  # sound, and another one's
    assert loaded(rows, store) == [CORRUPT, MISSING, CORRUPT, CORRUPT, DONE, DONE]
    assert one not in store.values
    assert other in store.values


@pytest.mark.parametrize("kind", [DictStore, BatchStore])
def test_of_a_thousand_corruptions_in_a_store_no_wrong_byte_comes_back(rows, kind):
    store, seeds = kind(), random.Random(3)
    stored(rows, store)
    sound, hits = dict(store.values), 0
    mover = rows.mover(store)
    for _ in range(1020 // len(KEYS)):
        for name, value in sound.items():
            changed = bytearray(value)
            at = seeds.randrange(64) if seeds.random() < 0.3 else seeds.randrange(len(changed))
            if seeds.random() < 0.8:
                changed[at] ^= 1 << seeds.randrange(8)
            else:
                del changed[at:]
            store.values[name] = bytes(changed)
        rows.poison()
        moved = mover.load(run())
        assert not moved.error
        for row, status in enumerate(moved.statuses):
            assert status in {DONE, MISSING, CORRUPT}
            assert status != DONE or rows.holds(row), "wrong bytes"
        hits += list(moved.statuses).count(DONE)
    assert hits < 200, "a change of zeros that nothing depends on does no harm"


def test_a_store_that_keeps_a_buffer_is_found_out_and_never_sees_another_value(rows):
    class Keeping(DictStore):
        kept = None

        def write(self, name, src):
            self.kept = self.kept or src[:4096]
            super().write(name, src)

        def read_into(self, name, dst):
            self.kept = self.kept or dst[:4096]
            return super().read_into(name, dst)

    store = Keeping()
    rows.fill()
    moved = rows.mover(store).store(run())
    assert list(moved.statuses) == [FAILED] * len(KEYS)
    assert moved.error.startswith("Keeping.write kept the buffer")
    kept = bytes(store.kept)
    assert set(rows.mover(store).store(run()).statuses) == {DONE, PRESENT}
    assert bytes(store.kept) == kept
    store.kept = None
    moved = rows.mover(store).load(run())
    assert list(moved.statuses) == [FAILED] * len(KEYS)
    assert moved.error.startswith("Keeping.read_into kept the buffer")


@pytest.mark.parametrize("answer", [None, [], -1, VALUE + 1, True, "4096"])
def test_an_answer_that_is_no_length_is_a_bug_of_the_plugin(answer):
    class Wrong(DictStore):
        def read_into(self, name, dst):
            return answer

    store = CompressedStore(Wrong(), ValueCompressor(), writes=True)
    with pytest.raises(StoreContractError, match=r"^Wrong.read_into "):
        store.read_into("a", memoryview(bytearray(VALUE)))


@pytest.mark.parametrize("compresses", [True, False])
def test_a_value_that_is_shorter_than_its_destination_has_its_length_and_a_longer_one_is_absent(compresses):
    store = compressed_store(DictStore(), "zstd" if compresses else "read")
    value = bytes(payload(1) + bytes(100))
    store.write("a", memoryview(value))
    room = memoryview(bytearray(VALUE + 4096))
    assert store.read_into("a", room) == VALUE
    assert room[:VALUE] == value
    assert store.read_into("a", room[: VALUE - 4096]) == 0


def test_a_failing_store_fails_as_without_compression_and_is_used_again(rows):
    class Failing(BatchStore):
        is_down = False

        def read_many_into(self, names, dsts):
            if self.is_down:
                raise ConnectionError("gone")
            return super().read_many_into(names, dsts)

    store = Failing()
    stored(rows, store)
    mover = rows.mover(store, retries=1)
    store.is_down = True
    moved = mover.load(run())
    assert list(moved.statuses) == [FAILED] * len(KEYS)
    assert "gone" in moved.error
    store.is_down = False
    assert set(mover.load(run()).statuses) == {DONE}


def test_a_host_without_the_option_imports_no_codec():
    code = "import sys, kvtiers.host.process; assert not {'numpy', 'zstandard'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# -- the conformance kit: a compressed store is a store


def compressed_memory():
    return compressed_store(MemoryStore(64 << 20), "zstd")


def compressed_fs(path):
    config = FsConfig(type="fs", path=path, capacity="1GiB", min_free=0)
    return compressed_store(FsStore(config), "zstd")


class CompressedTests(ChunkStoreTests):
    """The kit, without its tests of values in several views: core gives this store one view of each."""

    test_a_value_written_out_of_several_views_is_all_of_them_in_order = None
    test_a_value_read_into_several_views_fills_all_of_them_in_order = None
    test_of_several_views_a_shorter_value_fills_the_first_and_a_longer_one_is_absent = None
    test_no_buffer_of_a_batch_is_kept = None


class TestCompressedMemory(CompressedTests):
    store_class = CompressedStore
    persistent = False

    @pytest.fixture
    def open_store(self):
        return compressed_memory


class BatchMemory(MemoryStore):
    """The same, several values in a call."""

    batch_values = 32

    def read_many_into(self, names, dsts):
        return [self.read_into(name, dst) for name, [dst] in zip(names, dsts, strict=True)]

    def write_many(self, names, srcs):
        for name, [src] in zip(names, srcs, strict=True):
            self.write(name, src)
        return [None] * len(names)


def compressed_batches():
    return compressed_store(BatchMemory(64 << 20), "zstd")


class TestCompressedBatches(CompressedTests):
    store_class = type(compressed_batches())
    persistent = False

    @pytest.fixture
    def open_store(self):
        return compressed_batches


class TestCompressedFs(CompressedTests):
    store_class = CompressedStore

    @pytest.fixture
    def open_store(self, tmp_path):
        return partial(compressed_fs, tmp_path / "values")
