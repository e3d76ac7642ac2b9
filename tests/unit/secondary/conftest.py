"""Small real stores, a region of rows to move, and a clock that only the test winds."""

import logging
import threading
import time
from collections import deque
from types import SimpleNamespace

import pytest
from tests import stores
from tests.unit.secondary.async_tier import AsyncTier

from kvtiers.api import ChunkStore, NotKept, TierConfig, make_offload_key
from kvtiers.encryption.config import EncryptionConfig
from kvtiers.host.messages import Status
from kvtiers.host.transfer import MoverOptions, ValueMover
from kvtiers.host.transfer_pool import PoolOptions, TransferPool
from kvtiers.host.value_run import ValueRun
from kvtiers.layout.borrowed_views import ValueViews
from kvtiers.layout.storage_name import StorageNames
from kvtiers.secondary.managed.sealed_tier import SealedTier

PATIENCE = 60.0
VALUE, PAYLOAD, ROWS = 4096, 4000, 64
POISON = 0xDB
NAMES = StorageNames("test/model-0123456789abcdef01234567/", b"layout-1")


class Clock:
    """Time that passes when the test says so; as a stop event, a wait is passed time."""

    def __init__(self, now=1000.0):
        self.now = now
        self.waits = []
        self.stopped = False

    def __call__(self):
        return self.now

    def wait(self, seconds):
        self.waits.append(seconds)
        self.now += seconds
        return self.stopped

    def is_set(self):
        return self.stopped


class DictStore(stores.DictStore):
    """It keeps what was asked of it, in order."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.closed = 0

    def read_into(self, name, dst):
        self.calls.append(("read", name))
        return super().read_into(name, dst)

    def write(self, name, src):
        self.calls.append(("write", name))
        super().write(name, src)

    def exists(self, names):
        self.calls.append(("exists", tuple(names)))
        return super().exists(names)

    def delete(self, names):
        self.calls.append(("delete", tuple(names)))
        super().delete(names)

    def close(self):
        self.closed += 1

    def count(self, what):
        return sum(call[0] == what for call in self.calls)


class FullStore(DictStore):
    def write(self, name, src):
        raise NotKept("no room")


class BatchStore(DictStore):
    """The same, several values at a time, each of which may lie in several views."""

    batch_values = 32

    def read_many_into(self, names, dsts):
        self.calls.append(("read_many", tuple(names)))
        lengths = []
        for name, views in zip(names, dsts, strict=True):
            whole = memoryview(bytearray(sum(map(len, views))))
            lengths.append(DictStore.read_into(self, name, whole))
            at = 0
            for view in views if lengths[-1] else ():
                view[:] = whole[at : at + len(view)]
                at += len(view)
        return lengths

    def write_many(self, names, srcs):
        self.calls.append(("write_many", tuple(names)))
        for name, views in zip(names, srcs, strict=True):
            self.values[name] = b"".join(views)
        return [None] * len(names)


class GatedStore(DictStore):
    """Calls stand at a gate until the test opens it; ``reached`` counts those that have come to it."""

    def __init__(self, *gated):
        super().__init__()
        self.gated = set(gated)
        self.gate = threading.Event()
        self.reached = threading.Semaphore(0)
        self.running = []
        self.most_running = {}
        self._lock = threading.Lock()

    def _pass(self, what):
        with self._lock:
            self.running.append(what)
            self.most_running[what] = max(self.most_running.get(what, 0), self.running.count(what))
        try:
            if what in self.gated:
                self.reached.release()
                assert self.gate.wait(PATIENCE), "the gate stays shut"
        finally:
            with self._lock:
                self.running.remove(what)

    def read_into(self, name, dst):
        self._pass("read")
        return super().read_into(name, dst)

    def write(self, name, src):
        self._pass("write")
        super().write(name, src)

    def exists(self, names):
        if not names[0].endswith("/_epoch"):  # what core asks for itself while it opens a store
            self._pass("exists")
        return super().exists(names)

    def close(self):
        self._pass("close")
        super().close()

    def await_calls(self, count):
        for _ in range(count):
            assert self.reached.acquire(timeout=PATIENCE), "the call does not come"


class Events:
    """What a pool has emitted."""

    def __init__(self):
        self._events = deque()
        self._came = threading.Condition()

    def __call__(self, event):
        with self._came:
            self._events.append(event)
            self._came.notify_all()

    def all(self):
        with self._came:
            return list(self._events)

    def of(self, kind):
        return [event for event in self.all() if isinstance(event, kind)]

    def wait(self, kind, count=1, having=lambda _: True):
        """Wait until so many events of this kind have come; return them."""

        def these():
            return [event for event in self._events if isinstance(event, kind) and having(event)]

        with self._came:
            came = self._came.wait_for(lambda: len(these()) >= count, PATIENCE)
            assert came, f"no {count} {kind.__name__} in {list(self._events)}"
            return these()


class Rows:
    """A region of rows."""

    def __init__(self, rows=ROWS):
        self.memory = memoryview(bytearray([POISON]) * (rows * VALUE))
        self.views = ValueViews(self.memory, VALUE)

    def fill(self, row, key):
        self.memory[row * VALUE : row * VALUE + PAYLOAD] = payload(key)

    def poison(self, row):
        self.memory[row * VALUE : (row + 1) * VALUE] = bytes([POISON]) * VALUE

    def holds(self, row, key):
        return bytes(self.memory[row * VALUE : row * VALUE + PAYLOAD]) == payload(key)

    def is_poisoned(self, row):
        return bytes(self.memory[row * VALUE : (row + 1) * VALUE]) == bytes([POISON]) * VALUE


def key(number, group=0):
    return make_offload_key(number.to_bytes(32, "big"), group)


def payload(of):
    return (of * (PAYLOAD // len(of) + 1))[:PAYLOAD]


def wait_until(condition, what="it"):
    """Wait until the condition holds; a hang is a failure with a name."""
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, f"{what} does not happen"
        time.sleep(0.002)


@pytest.fixture
def kit():
    """The parts above by name; ``mover`` and ``pool`` make theirs over one region, and pools are closed at the end."""
    rows = Rows()
    pools = []

    def mover(store, *, stop=None, **options):
        sizes = options.pop("sizes", [(PAYLOAD, VALUE)])
        return ValueMover(store, rows.views, MoverOptions(sizes, **options), stop or threading.Event())

    def stored(store, keys, **options):
        """A mover that has stored these chunks, whose rows have been poisoned since."""
        made = mover(store, **options)
        for row, key in enumerate(keys):
            rows.fill(row, key)
        assert set(made.store(run(keys)).statuses) == {Status.DONE}
        for row in range(len(keys)):
            rows.poison(row)
        return made

    def run(keys, *, within=PATIENCE, names=NAMES, **more):
        return ValueRun(names, keys, range(len(keys)), time.monotonic() + within, **more)

    def pool(store, *, threads=2, deadline=PATIENCE, reopen=(0.01, 0.02), encryption=None, key_wait=5.0, **options):
        def open_store():
            return store() if not isinstance(store, ChunkStore) else store

        events = Events()
        made = TransferPool(
            open_store,
            rows.views,
            NAMES,
            PoolOptions(
                MoverOptions([(PAYLOAD, VALUE)], **options), "test", threads, deadline, reopen, key_wait=key_wait
            ),
            events,
            encryption=encryption and EncryptionConfig.model_validate(encryption),
        )
        pools.append((made, store))
        return made, events

    yield SimpleNamespace(
        Clock=Clock,
        DictStore=DictStore,
        FullStore=FullStore,
        BatchStore=BatchStore,
        GatedStore=GatedStore,
        Events=Events,
        NAMES=NAMES,
        PATIENCE=PATIENCE,
        VALUE=VALUE,
        PAYLOAD=PAYLOAD,
        key=key,
        payload=payload,
        rows=rows,
        mover=mover,
        stored=stored,
        run=run,
        pool=pool,
        wait_until=wait_until,
    )
    for made, store in pools:
        if isinstance(store, GatedStore):
            store.gate.set()
        made.close(PATIENCE)


@pytest.fixture
def clock(kit):
    return kit.Clock()


@pytest.fixture
def keys(kit):
    return [kit.key(number) for number in range(4)]


@pytest.fixture
def sealed(kit, clock):
    """Make a tier of the third rung under protection; all are closed at the end."""
    tiers = []

    def make(opener=None, waits=None, **options):
        inner = AsyncTier(kit.rows, kit.VALUE)
        config = TierConfig.model_validate({"type": "t", "breaker": {"failures": 2, "delay": "10ms"}, **options})
        sizes = [(kit.PAYLOAD, kit.VALUE)]
        tier = SealedTier(config, opener or (lambda: inner), kit.rows.views, kit.NAMES, sizes, clock, **(waits or {}))
        tiers.append(tier)
        if opener is None:
            assert tier.wait_open(kit.PATIENCE) == ""
        return tier, inner

    yield make
    for tier in tiers:
        tier.close()


@pytest.fixture(params=["DictStore", "BatchStore"])
def store(kit, request):
    """An empty store that moves values one by one, and one that moves several at a time."""
    return getattr(kit, request.param)()


@pytest.fixture
def log_lines(caplog):
    """Wait for a line in the log that a thread writes; return it."""
    caplog.set_level(logging.INFO, "kvtiers")

    def wait(text):
        wait_until(lambda: text in caplog.text, f"{text!r} in the log")
        return next(record.getMessage() for record in caplog.records if text in record.getMessage())

    return wait
