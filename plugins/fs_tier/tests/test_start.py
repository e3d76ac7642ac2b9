"""A store with many values starts, writes and answers as fast as an empty one: nothing walks the directory."""

import json
import os
import subprocess
import sys

import pytest

from kvtiers_fs.paths import place_of

_WATCHED = """
import json, sys
from collections import Counter
from kvtiers_fs.config import FsConfig
from kvtiers_fs.store import FsStore
import kvtiers_fs.diagnosis

path, known = sys.argv[1:]
events = Counter()
armed = False

def watch(event, args):
    if armed and event in {"os.scandir", "os.listdir"}:
        events[event] += 1

sys.addaudithook(watch)
armed = True
store = FsStore(FsConfig(type="fs", path=path, capacity="100GiB", min_free=0))
value = memoryview(bytearray(4096))
for number in range(50):
    store.write(f"ns/new/{number:064x}", value)
    assert store.read_into(f"ns/new/{number:064x}", value)
    assert store.exists([f"ns/new/{number:064x}", known, f"ns/no/{number:064x}"]) == [True, True, False]
store.delete([f"ns/new/{number:064x}" for number in range(50)])
store.close()
armed = False
print(json.dumps([events, store.stats()["values"]]))
"""


def start(folder, known):
    done = subprocess.run(
        [sys.executable, "-c", _WATCHED, str(folder.path), known], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.fixture
def populated(folder):
    """Return a function that makes this many values, empty, and lets a store count them once."""

    def populate(count):
        folder.open()
        folder.close()
        for number in range(count):
            place = place_of(f"ns/model-{'0' * 24}/{number:064x}")
            path = folder.path / place.folder
            path.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path / place.leaf, os.O_CREAT | os.O_WRONLY))
        (folder.path / ".usage").unlink()
        folder.settle(folder.open())
        folder.close()
        return f"ns/model-{'0' * 24}/{0:064x}"

    return populate


@pytest.mark.slow
def test_a_start_and_its_first_writes_list_no_folder_however_many_values_there_are(folder, populated):
    events, values = start(folder, populated(20_000))
    assert values == 20_000
    assert events == {}


@pytest.mark.slow
def test_the_watch_of_the_test_above_sees_a_walk(folder, populated):
    known = populated(300)
    (folder.path / ".usage").unlink()
    events, values = start(folder, known)
    assert events["os.scandir"] > 200
    assert values >= 300


def test_after_a_usage_file_was_lost_writes_go_on_while_values_are_counted(folder, populated, value, names):
    populated(5_000)
    (folder.path / ".usage").unlink()
    store = folder.open()
    store.write(names(1)[0], value(1))
    assert store.exists(names(1)) == [False]
    folder.settle(store)
    assert store.stats()["values"] == 5_001
