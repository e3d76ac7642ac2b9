"""Several processes on one directory, some of them killed at any moment."""

import fcntl
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from kvtiers_fs.directory import Directory, Permissions
from kvtiers_fs.quota import UsageFile
from kvtiers_fs.waits import USUAL_WAITS

pytestmark = pytest.mark.slow

PAGE = 4096
PAGES = 16
CAPACITY = 400 * PAGES * PAGE

_WORKER = """
import mmap, random, sys
from kvtiers.api import NotKept
from kvtiers_fs.config import FsConfig
from kvtiers_fs.waits import USUAL_WAITS, Waits
from kvtiers_fs.store import FsStore

path, wait, *numbers = sys.argv[1:]
waits = Waits(room=float(wait), report=max(float(wait), USUAL_WAITS.report))
capacity, nbytes, seed, turns = map(int, numbers)
config = FsConfig(type="fs", path=path, capacity=capacity, min_free=0, deadline=f"{4 * waits.report}s")
store = FsStore(config, waits=waits)
choice = random.Random(seed)
source, target = memoryview(mmap.mmap(-1, nbytes)), memoryview(mmap.mmap(-1, nbytes))
names = [f"ns/model-{'0' * 24}/{number:064x}" for number in range(4000)]
dropped = 0
print("ready", flush=True)
for turn in range(turns):
    name = choice.choice(names)
    if choice.random() < 0.7:
        # A value says at every place who wrote it, and when.
        source[:] = (seed * 1_000_000 + turn).to_bytes(8, "little") * (nbytes // 8)
        try:
            store.write(name, source)
        except NotKept:
            dropped += 1
    elif choice.random() < 0.95:
        if store.read_into(name, target) == nbytes:
            assert target == bytes(target[:8]) * (nbytes // 8), "a reader got a mix of two writes"
    else:
        store.delete([name])
store.close()
print("done", dropped, flush=True)
"""


def start(folder, seed, turns, *, wait=USUAL_WAITS.room):
    """Start a worker that waits so many seconds for the evictor before it drops a value."""
    command = [sys.executable, "-c", _WORKER, folder.path, wait, CAPACITY, PAGES * PAGE, seed, turns]
    worker = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert worker.stdout.readline() == "ready\n", worker.stderr.read()
    return worker


def held(folder, workers):
    """Return the bytes of all values at one moment, at which all workers stand still."""
    running = [worker for worker in workers if worker.poll() is None]
    for worker in running:
        worker.send_signal(signal.SIGSTOP)
    for worker in running:
        if worker.returncode is None:  # Popen looks, and reaps one that has ended meanwhile, before it sends a signal
            os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    try:
        return folder.held()
    finally:
        for worker in running:
            worker.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("killed", [0, 12], ids=["none_killed", "killed_in_the_middle"])
def test_processes_that_write_read_delete_and_evict_together_keep_whole_values_and_the_capacity(folder, read, killed):
    choice, most = random.Random(7), 0
    workers = [start(folder, seed, 1000 if not killed else 10**9) for seed in range(4)]
    until = time.monotonic() + 250
    seed = 100
    while killed or any(worker.poll() is None for worker in workers):
        assert time.monotonic() < until, "the workers do not end"
        time.sleep(0.05)  # they stand still while they are looked at
        most = max(most, held(folder, workers))
        if killed:
            victim = workers.pop(choice.randrange(len(workers)))
            victim.send_signal(signal.SIGKILL)
            assert victim.wait(60) == -signal.SIGKILL, victim.stderr.read()
            victim.stdout.close()
            victim.stderr.close()
            killed -= 1
            workers.append(start(folder, seed := seed + 1, 10**9 if killed > 3 else 1000))
        if killed == 0:
            for worker in workers:
                if worker.args[-1] == str(10**9):
                    worker.kill()
    for worker in workers:
        out, errors = worker.communicate(timeout=500)
        assert worker.returncode in {0, -signal.SIGKILL}, errors
        assert "Traceback" not in errors
        assert worker.returncode or out.startswith("done")
    # A step or a value more for each process that writes; what a killed one had not reported is found by counting.
    assert most <= CAPACITY + 4 * max(CAPACITY // 128, PAGES * PAGE)
    store = folder.open(capacity=CAPACITY)
    folder.count_again(store)
    assert folder.held() <= 0.95 * CAPACITY
    listed = folder.names(store)
    assert len(listed) > 300
    for name in listed:
        back = read(store, name, PAGES)
        assert back == back[:8] * (PAGES * PAGE // 8), "a killed process left half a value"


def test_temporary_files_of_killed_processes_are_reclaimed(folder, value, names):
    store = folder.open(capacity=CAPACITY)
    left, until = [], time.monotonic() + 250
    while not left:
        assert time.monotonic() < until, "no kill came during a write"
        worker = start(folder, 1, 10**9)
        folder.held()
        worker.kill()
        worker.communicate()
        left = folder.temps()
    for path in left:
        folder.age_file(path, 700)
    folder.count_again(store)
    assert not folder.temps()


def test_what_one_process_wrote_another_finds_at_once(folder, read):
    worker = start(folder, 5, 500, wait=60)
    out, errors = worker.communicate(timeout=500)
    assert out == "done 0\n", errors
    store = folder.open(capacity=CAPACITY)
    listed = folder.names(store)
    assert len(listed) > 100
    assert store.stats()["values"] == len(listed)
    assert all(read(store, name, PAGES) for name in listed[:20])


def test_only_one_evictor_has_the_lock_and_its_end_ends_the_lock(folder):
    folder.open()
    folder.close()
    root = os.open(folder.path, os.O_RDONLY)
    one, other = (UsageFile(Directory(root, Permissions(0o600)), read_only=False) for _ in range(2))
    try:
        with one.locked() as first, other.locked() as second:
            assert (first, second) == (True, False)
        with other.locked() as again:
            assert again
            one.close()
        one = UsageFile(Directory(root, Permissions(0o600)), read_only=False)
        fcntl.flock(one._fd, fcntl.LOCK_EX)
        with other.locked() as held:
            assert not held
        one.close()  # as the kernel does for a process that dies
        with other.locked() as free:
            assert free
    finally:
        other.close()
        os.close(root)
