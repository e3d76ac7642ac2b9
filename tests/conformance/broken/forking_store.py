"""A store that forks in a write, and whose child comes back from it as the parent does.

Not collected by itself: ``test_forking_store.py`` runs pytest on this file.
"""

import os
from functools import partial
from pathlib import Path

import pytest

from kvtiers.api import ChunkStore
from kvtiers.testing import ChunkStoreTests


class Forks(ChunkStore):
    forked = False

    def __init__(self, folder):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def read_into(self, name, dst):
        try:
            value = (self.folder / name.replace("/", "+")).read_bytes()
        except FileNotFoundError:
            return 0
        if len(value) > len(dst):
            return 0
        dst[: len(value)] = value
        return len(value)

    def write(self, name, src):
        if not self.forked:
            self.forked = True
            os.fork()
        (self.folder / name.replace("/", "+")).write_bytes(src)

    def exists(self, names):
        return [(self.folder / name.replace("/", "+")).exists() for name in names]

    def delete(self, names):
        for name in names:
            (self.folder / name.replace("/", "+")).unlink(missing_ok=True)


class TestForks(ChunkStoreTests):
    store_class = Forks

    @pytest.fixture
    def open_store(self, tmp_path):
        return partial(Forks, tmp_path / "values")
