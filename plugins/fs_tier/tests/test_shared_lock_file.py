"""The file that engines lock: a store never lists, counts, evicts or changes it, whatever is locked in it."""

import fcntl
import os
import struct

import pytest

from kvtiers_fs.config import FsConfig
from kvtiers_fs.root import FORMAT, SLAB_DIRECTORY


@pytest.fixture
def locked():
    """Return a function that opens a config's lock file, and locks a byte far behind its end."""
    opened = []

    def lock(path):
        opened.append(os.open(path, os.O_RDWR))
        fcntl.fcntl(opened[-1], fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 1 << 62, 1, 0))

    yield lock
    for fd in opened:
        os.close(fd)


@pytest.mark.parametrize("layout", ["files", "slab"])
def test_the_lock_file_is_no_value_and_stays_as_it_is(request, layout, locked, value, names):
    folder = request.getfixturevalue("folder" if layout == "files" else "slab_folder")
    path = FsConfig(type="fs", path=folder.path, capacity="1MiB", layout=layout).shared_lock_file
    content = FORMAT if layout == "files" else SLAB_DIRECTORY
    store = folder.open(capacity="1MiB")
    locked(path)
    many = names(400)  # more than there is room for
    for number, name in enumerate(many):
        store.write(name, value(number % 251))
        if not number % 50:
            folder.settle(store)
    folder.settle(store)
    entries = [*store.list("")]
    assert {entry.name for entry in entries} < {*many}
    store.delete([entry.name for entry in entries])
    folder.settle(store)
    assert not [*store.list("")]
    assert store.stats()["values"] == store.stats()["bytes"] == 0
    before = path.stat()
    assert path.read_bytes() == content
    folder.close()
    folder.open(capacity="1MiB", max_age="1ms" if layout == "files" else None)  # one with the locks still there
    assert path.stat().st_ino == before.st_ino
    assert path.read_bytes() == content
