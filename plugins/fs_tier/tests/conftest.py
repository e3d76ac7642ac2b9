"""Stores in a directory of the test's own, and what it takes to look at them from outside."""

import contextlib
import importlib.util
import mmap
import os
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtiers_fs.config import FsConfig
from kvtiers_fs.paths import place_of
from kvtiers_fs.quota import Index
from kvtiers_fs.slab.evictor import SlabEvictor
from kvtiers_fs.slab.store import SlabStore
from kvtiers_fs.store import FsStore
from kvtiers_fs.waits import Waits

PAGE = 4096
PATIENCE = 60.0
_spec = importlib.util.spec_from_file_location("kvtiers_fs_pretended", Path(__file__).with_name("pretended.py"))
pretended = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(pretended)


class Folder:
    """One root, its stores, and its files as the file system has them."""

    waits = Waits(room=PATIENCE, report=PATIENCE, round=PATIENCE, close=PATIENCE)
    """Writes wait for the evictor, and the evictor's rounds take, as long as a busy machine needs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stores: list[FsStore] = []

    def open(self, capacity="1GiB", *, read_only=False, waits=None, **options) -> FsStore:
        # Of the deadline a call may wait a quarter for reports.
        options = {"min_free": 0, "deadline": f"{4 * PATIENCE}s", **options}
        config = FsConfig(type="fs", path=self.path, capacity=capacity, **options)
        self.stores.append(FsStore(config, read_only=read_only, waits=waits or self.waits))
        return self.stores[-1]

    def close(self) -> None:
        while self.stores:
            self.stores.pop().close()

    def file(self, name: str) -> Path:
        place = place_of(name)
        return self.path / place.folder / place.leaf

    def age(self, name: str, seconds: float) -> None:
        self.age_file(self.file(name), seconds)

    @staticmethod
    def age_file(path: Path, seconds: float) -> None:
        then = time.time() - seconds
        os.utime(path, (then, then))

    def files(self) -> list[Path]:
        """Return all files but those in the root itself. Folders may come and go meanwhile."""
        found = [Path(folder, name) for folder, _, names in os.walk(self.path) for name in names]
        return [path for path in found if path.parent != self.path and not path.name.startswith(".tmp-")]

    def held(self) -> int:
        """Return the bytes of all values."""
        total = 0
        for path in self.files():
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size
        return total

    def temps(self) -> list[Path]:
        """Return the files that are being written, or were once. Folders may come and go meanwhile."""
        return [Path(at, name) for at, _, names in os.walk(self.path) for name in names if name.startswith(".tmp-")]

    @staticmethod
    def names(store) -> list[str]:
        return sorted(entry.name for entry in store.list(""))

    @staticmethod
    @contextlib.contextmanager
    def index_of(store) -> Iterator[Index]:
        """Give the index to be changed; the store's own evictor waits meanwhile."""
        with store._evictor.turn, store._usage.locked() as is_mine:
            assert is_mine
            index = store._usage.load()
            yield index
            store._usage.save(index)

    def count_again(self, store) -> None:
        """Let the evictor count every shard as if it never had."""
        with self.index_of(store) as index:
            index.counted = [0.0] * len(index.counted)
        self.settle(store)

    @staticmethod
    def settle(store) -> None:
        """Let the evictor come to rest: what is reported is counted, what is over the limits is gone."""
        until = time.monotonic() + PATIENCE
        while store._evictor.round() < 1:
            assert time.monotonic() < until, "the evictor does not come to rest"


class SlabFolder:
    """One root with a slab, and its stores."""

    waits = Waits(lock=PATIENCE, close=PATIENCE)
    """They wait for each other's lock, and for their evictors, as long as it takes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stores: list[SlabStore] = []

    def open(self, capacity="1GiB", *, read_only=False, waits=None, **options) -> SlabStore:
        options = {"min_free": 0, "layout": "slab", **options}
        config = FsConfig(type="fs", path=self.path, capacity=capacity, **options)
        self.stores.append(SlabStore(config, read_only=read_only, waits=waits or self.waits))
        return self.stores[-1]

    def close(self) -> None:
        while self.stores:
            self.stores.pop().close()

    def segments(self) -> int:
        return len(list(self.path.glob("slab-*.values")))

    @staticmethod
    def settle(store) -> None:
        """Let the evictor do what is due, and publish its figures; what its thread is at is done first."""
        store._evictor.round()


@pytest.fixture
def slab_folder(tmp_path, monkeypatch):
    """A folder for slabs, whose evictors make no two rounds at once."""
    one_round, rounds = SlabEvictor.round, threading.Lock()

    def round_by_itself(evictor):
        with rounds:
            one_round(evictor)

    monkeypatch.setattr(SlabEvictor, "round", round_by_itself)
    folder = SlabFolder(tmp_path / "values")
    yield folder
    folder.close()


@pytest.fixture
def folder(tmp_path):
    """A folder whose stores are as patient as a busy machine needs."""
    folder = Folder(tmp_path / "values")
    yield folder
    folder.close()


@pytest.fixture
def value():
    """Return a function that gives a value of so many pages, page-aligned, each with the same bytes."""

    def make(byte: int, pages: int = 1) -> memoryview:
        memory = memoryview(mmap.mmap(-1, pages * PAGE))
        memory[:] = bytes([byte]) * len(memory)
        return memory

    return make


@pytest.fixture
def names():
    """Return a function that gives so many new names of the usual shape."""

    def make(count: int, model: str = "model-0123456789abcdef01234567", namespace: str = "ns") -> list[str]:
        return [f"{namespace}/{model}/{uuid.uuid4().hex}00000000" for _ in range(count)]

    return make


@pytest.fixture
def read():
    """Return a function that reads a value of so many pages, or None."""

    def read_one(store, name: str, pages: int = 1) -> bytes | None:
        back = memoryview(mmap.mmap(-1, pages * PAGE))
        return bytes(back) if store.read_into(name, back) == len(back) else None

    return read_one


def _may_mount() -> bool:
    """Say whether we may mount a file system; the one that is tried ends with its mount namespace."""
    trial = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    try:
        return subprocess.run(trial, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture(params=["real", "pretended"] if _may_mount() else ["pretended"])
def mounted(request, tmp_path, folder, monkeypatch):
    """Return a function that mounts a small file system for ``folder``, or pretends to: that needs no rights."""
    points = []

    def mount(kind: str, options: str) -> None:
        folder.path = tmp_path / "mount"
        folder.path.mkdir(0o700)
        if request.param == "real":
            subprocess.run(["mount", "-t", kind, "-o", options, "none", str(folder.path)], check=True)
            points.append(folder.path)
            folder.path.chmod(0o700)
        else:
            limits = dict(option.split("=") for option in options.split(","))
            pretended.PretendedMount(monkeypatch, folder.path, kind, limits)

    yield mount
    folder.close()
    for point in points:
        subprocess.run(["umount", str(point)], check=True)


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """Let the test's folder be on a disk, also in a container, in a chroot, or where /tmp is memory."""
    pretended.pretend_mounts(monkeypatch, tmp_path / "mounts", ("/", "ext4"))


@pytest.fixture
def group(tmp_path):
    """The id of a group to share with: a foreign one where we may give it files, else the best of our own."""
    probe = tmp_path / "probe"
    probe.touch()
    for gid in (54321, *(gid for gid in os.getgroups() if gid != os.getegid())):
        with contextlib.suppress(PermissionError):
            os.chown(probe, -1, gid)
            return gid
    return os.getegid()
