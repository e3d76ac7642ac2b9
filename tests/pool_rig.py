"""Engines and keepers for tests of a pool: all that an engine finds is compared with what belongs to its key.

What a test starts ends with it, by ``end_all``, also where it fails: a thread that goes on would keep pytest from
ending, and a socket that nobody closes would be another test's error.
"""

import contextlib
import fcntl
import hashlib
import itertools
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

from kvtiers._process import receive_fds
from kvtiers.api import make_offload_key
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.layout.storage_name import StorageNames
from kvtiers.pool.descriptor_store import DescriptorStore
from kvtiers.pool.keeper import Keeper
from kvtiers.pool.listening import listen
from kvtiers.pool.loan import PoolLoan
from kvtiers.pool.loan import pool_figures as asked_figures
from kvtiers.pool.memory import Index, Plane, Shape
from kvtiers.primary.pooled import PooledPrimaryTier
from kvtiers.region.memfd import map_memory

PAYLOAD = 4000
LAYOUT = CacheLayout(ModelIdentity("m", weights="w1"), (KVGroup("g", 16),), (KVTensor("t", 0, PAYLOAD),))
PREFIX = StorageNames.of_layout("default", LAYOUT).prefix
OTHER, THIRD = (
    CacheLayout(ModelIdentity(name, weights="w1"), (KVGroup("g", 16),), (KVTensor("t", 0, nbytes),))
    for name, nbytes in (("n", 2 * PAYLOAD), ("o", 3 * PAYLOAD))
)
"""Of other models, whose rows are larger."""
PATIENCE = 60.0
_ends = contextlib.ExitStack()


def end_all():
    """End what was started and has not ended yet, the newest first."""
    _ends.close()


def wait_until(condition, what):
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.002)


def pool_figures(path):
    """The keeper's figures, with those of its first part, however late a busy machine lets it answer."""
    figures = asked_figures(str(path), PATIENCE)
    return {**figures["parts"][0], **figures}


def chain(prompt, count):
    """The keys of a prompt's chunks."""
    return [make_offload_key(hashlib.sha256(b"%d/%d" % (prompt, i)).digest(), 0) for i in range(count)]


def payload(key, nbytes=PAYLOAD):
    return hashlib.shake_128(b"%d" % nbytes + key).digest(nbytes)


class WrongBytesError(AssertionError):
    """A row held other bytes than those of the chunk that it was found for."""


class PoolEngine:
    """The primary of an engine without ranks, tiers or requests, in a pool whose keeper it often looks for."""

    def __init__(self, path, *, policy="lru", layout=LAYOUT, prefix=None, deadline=PATIENCE, **more):
        prefix = prefix or StorageNames.of_layout("default", layout).prefix
        self._nbytes = layout.payload_bytes(0)
        self._end = _ends.enter_context(contextlib.ExitStack())
        self.loan = PoolLoan.take(str(path), prefix, layout, deadline, **{"look_seconds": 0.002, **more})
        self._end.callback(self.loan.close)
        rows, stride = self.loan.take_rows(), layout.row_stride
        self._end.callback(os.close, rows)
        self._mapping = map_memory(rows, self.loan.nbytes, self.loan.num_rows * stride)
        self._end.callback(self._mapping.close)
        self.tier = PooledPrimaryTier(self.loan, stride, self._mapping.view, policy=policy)
        self._end.callback(self.tier.close)
        self._left = []

    def row(self, row):
        at = row * self.tier.row_stride
        return self._mapping.view[at : at + self._nbytes]

    def fill(self, keys, rows):
        """Write chunks as a copy does: not at once."""
        for key, row in zip(keys, rows, strict=True):
            whole, view, half = payload(key, self._nbytes), self.row(row), self._nbytes // 2
            view[:half] = whole[:half]
            view[half:] = whole[half:]

    def store(self, keys):
        """Store chunks; return their rows."""
        allocation = self.tier.prepare_store(keys, "a request")
        self.fill(allocation.keys, allocation.rows)
        self.tier.complete_store(allocation.rows, True)
        return allocation.rows

    def load(self, keys):
        """Load the leading chunks that are there; return how many. WrongBytesError if one is not what it was."""
        self.await_checks(keys)
        count = self.tier.ready_run(keys)
        if rows := self.tier.prepare_load(keys[:count], "a request") or []:
            self.compare(keys[:count], rows)
            self.tier.complete_load(rows)
        return count

    def await_checks(self, keys):
        """Wait until the chunks of others that are among these have been checked."""

        def are_checked():
            self.tier.poll()
            return not self.tier.resident_run(keys)[1]

        wait_until(are_checked, "the chunks of others are not checked")

    def compare(self, keys, rows):
        for key, row in zip(keys, rows, strict=True):
            if bytes(self.row(row)) != payload(key, self._nbytes):
                raise WrongBytesError(f"row {row}")

    def rows_of(self, keys):
        """The rows of these chunks, all of which are readable here."""
        rows = self.tier.prepare_read(keys)
        assert rows is not None, "they are not all readable"
        self.tier.complete_read(rows)
        return rows

    def check(self):
        """Compare all chunks that are there; return how many."""
        self.compare(*zip(*self.tier._row_of.items(), strict=True)) if self.tier._row_of else None
        return len(self.tier._row_of)

    def is_published(self):
        """Whether the index has all chunks that are readable here."""
        has, now, state = self.loan._index.editions, self.loan._plane.editions, self.tier._rows.state
        rows = [row for row in self.tier._row_of.values() if row in self.loan.own and state[row] >= 0]
        return all(has[row] == now[row] for row in rows)

    def read_left(self):
        """Read some of what other engines have left, as a job does that writes it to a tier."""
        self._left += self.tier.take_left()
        keys = self.tier.to_offer(self._left[-16:])
        if keys and (rows := self.tier.prepare_read(keys)) is None:
            return  # they are not checked yet
        if keys:
            self.compare(keys, rows)
            self.tier.complete_read(rows)
        del self._left[-16:]

    def live(self, chance):
        """Do one thing that an engine does, and write down what others have left."""
        self.tier.poll()
        self.read_left()
        keys = chain(chance.randrange(60), chance.randrange(20, 90))
        what = chance.random()
        if what < 0.005:
            self.tier.reset_cache()
        elif what < 0.02:
            self.tier.forget(keys)
        elif what < 0.2:  # a promotion, of which not all lands
            allocation = self.tier.prepare_write(keys, "a request", reserve_rows=10)
            if allocation is not None and allocation.rows:
                landed = allocation.keys[: chance.randrange(len(allocation.keys) + 1)]
                self.fill(landed, allocation.rows[: len(landed)])
                self.tier.complete_write(allocation.rows, False, landed, protects=False)
        else:
            rest = keys[self.load(keys) :]
            allocation = self.tier.prepare_store(rest, "a request") if rest else None
            if allocation is not None:
                self.fill(allocation.keys, allocation.rows)
                self.tier.complete_store(allocation.rows, chance.random() > 0.1)

    def close(self):
        """End the engine. May be called again."""
        self._end.close()


@contextlib.contextmanager
def sleeping():
    """A process that is there until the end of the block."""
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def watch(engine, rank, process):
    pidfd = os.pidfd_open(process.pid)
    engine.loan.watch(rank, pidfd)
    os.close(pidfd)


class ServiceManager:
    """What systemd does with a service's descriptors: it keeps those that it is sent, by name, and passes them on."""

    def __init__(self, path):
        self.address = str(path)
        self.ready = 0
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(self.address)
        self._sock.setblocking(False)
        self._kept = []
        self._lock = threading.Lock()
        self._stopped, self._stop = socket.socketpair()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._end = _ends.enter_context(contextlib.ExitStack())
        self._end.callback(self._close)

    def _run(self):
        while self._stopped not in select.select([self._sock, self._stopped], [], [])[0]:
            self.kept()

    def kept(self):
        """The descriptors by name, after all that was sent; they stay the manager's."""
        with self._lock:
            while True:
                try:
                    message, fds = receive_fds(self._sock, 4096, 8)
                except BlockingIOError:
                    return list(self._kept)
                self._do(dict(line.split("=", 1) for line in message.decode().splitlines()), fds)

    def _do(self, message, fds):
        self.ready += "READY" in message
        if "FDSTORE" in message:
            self._kept[:0] = [(message["FDNAME"], fd) for fd in fds]  # the newest first, as systemd passes them
        elif "FDSTOREREMOVE" in message:
            self._remove(message["FDNAME"])
        elif "BARRIER" in message:
            os.close(*fds)

    def _remove(self, name):
        for each in [each for each in self._kept if each[0] == name]:
            self._kept.remove(each)
            os.close(each[1])

    def remove(self, name):
        """Let a descriptor go, as a process's that has ended."""
        self.kept()
        with self._lock:
            self._remove(name)

    def keep_again(self, name):
        """Have two of a name, as after a removal that was not taken."""
        self._kept.append((name, os.dup(dict(self.kept())[name])))

    def names(self):
        return sorted(name for name, _ in self.kept())

    def store(self):
        """The store of the next process, where that is this one."""
        return DescriptorStore(self.address, [(name, os.dup(fd)) for name, fd in self.kept()])

    def start(self, *words):
        """Start the command in a process of its own, as its service."""
        kept = self.kept()
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 200) for _, fd in kept]
        names = ":".join(name for name, _ in kept)
        environment = {"NOTIFY_SOCKET": self.address, "LISTEN_FDS": str(len(high)), "LISTEN_FDNAMES": names}
        process = subprocess.Popen(
            [sys.executable, "-c", _SERVICE, ",".join(map(str, high)), *map(str, words)],
            env={**os.environ, **environment},
            pass_fds=high,
            stderr=subprocess.PIPE,
            text=True,
        )
        for fd in high:
            os.close(fd)
        return process

    def close(self):
        """Let all go, and end. May be called again."""
        self._end.close()

    def _close(self):
        self._stop.close()
        self._thread.join(PATIENCE)
        for _, fd in self.kept():
            os.close(fd)
        self._sock.close()
        self._stopped.close()
        Path(self.address).unlink(missing_ok=True)


_SERVICE = """
import os, sys
for number, fd in enumerate(filter(None, sys.argv.pop(1).split(","))):
    os.dup2(int(fd), 3 + number)
    os.close(int(fd))
os.environ["LISTEN_PID"] = str(os.getpid())
from kvtiers.cli.main import main
main()
"""


class KeeperThread:
    """A keeper in this process. ``manager``: a ``ServiceManager``."""

    def __init__(self, path, size, handover=0.0, manager=None, parts=1):
        self.path = path
        self._listener = listen(path)
        self._end = _ends.enter_context(contextlib.ExitStack())
        self._end.callback(self._listener.close)
        self._end.callback(path.unlink, missing_ok=True)
        store = manager.store() if manager is not None else None
        self.keeper = Keeper(self._listener, size, parts, handover=handover, store=store)
        self._thread = threading.Thread(target=self.keeper.serve)
        self._thread.start()
        self._end.callback(self._thread.join, PATIENCE)
        self._end.callback(self.keeper.stop)

    def figures(self):
        return pool_figures(self.path)

    def stop(self):
        """End the keeper. May be called again."""
        self._end.close()


class Forks:
    """A process that forks keepers and engines, so that each starts in a moment, and reports their process ids."""

    def __init__(self, bug=""):
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.settimeout(PATIENCE)
        with theirs:
            command = [sys.executable, str(Path(__file__)), str(theirs.fileno()), bug]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])

    def start(self, *words, manager=None):
        """Fork what ``main`` does with these words; a keeper as the service of this manager."""
        ours, theirs = socket.socketpair()
        kept = manager.kept() if manager is not None else []
        if manager is not None:
            words = (*words, manager.address, ":".join(name for name, _ in kept))
        with theirs:
            fds = [theirs.fileno(), *(fd for _, fd in kept)]
            socket.send_fds(self._requests, [" ".join(map(str, words)).encode()], fds)
        fork = Fork(int(self._requests.recv(100)), ours)
        _ends.callback(fork.end)
        return fork

    def close(self):
        self._requests.close()
        self._process.wait(PATIENCE)


class Fork:
    """A forked process, which writes a byte for each thing that it has done."""

    def __init__(self, pid, sock):
        self.pid = pid
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:  # killed by now, and reaped
            self._pidfd, writer = os.pipe()  # readable, as a pidfd is then
            os.close(writer)
        self._sock = sock
        sock.settimeout(PATIENCE)

    def wait_for(self, count):
        """Wait until it has done so much more."""
        while count > 0 and (told := self._sock.recv(count)):
            assert b"!" not in told, "it has found wrong bytes, or has raised"
            count -= len(told)

    def publish(self):
        """Have an engine wait until all it has is published, and go on; return whether it says so."""
        self._sock.sendall(b"?")
        while (told := self._sock.recv(1)) == b".":
            pass
        assert told != b"!", "it has found wrong bytes, or has raised"
        self._sock.sendall(b".")
        return told == b"="

    @property
    def has_ended(self):
        return bool(select.select([self._pidfd], [], [], 0)[0])

    def kill(self):
        assert b"!" not in self.end(), "it has found wrong bytes, or has raised"

    def end(self):
        """Kill it; return what it had written."""
        if self._sock.fileno() < 0:
            return b""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        select.select([self._pidfd], [], [], PATIENCE)
        told = b""
        with contextlib.suppress(OSError):
            while more := self._sock.recv(1 << 16):
                told += more
        self._sock.close()
        os.close(self._pidfd)
        return told


def _keep(sock, kept, path, size, handover, kill_at, parts, manager="", names=""):
    """Be a keeper, which is killed before the so many-th line of the pool's code that it executes (0: never)."""
    left = int(kill_at)

    def line(frame, event, argument):
        nonlocal left
        if event == "line":
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
        return line

    def call(frame, event, argument):
        return line if "/kvtiers/pool/" in frame.f_code.co_filename else None

    listener = listen(Path(path))
    store = DescriptorStore(manager, zip(names.split(":"), kept, strict=False))
    keeper = Keeper(listener, int(size), int(parts), handover=float(handover), store=store, look_seconds=0.002)
    if left:
        sys.settrace(call)
    sock.sendall(b".")
    keeper.serve()


def _live(sock, _, path, policy, seed, layout="LAYOUT"):
    """Be an engine until killed; at a byte from the test, publish all there is, answer, and go on at another one."""
    engine, chance = PoolEngine(path, policy=policy, layout=globals()[layout]), random.Random(seed)
    engine.check()
    while True:
        engine.live(chance)
        sock.sendall(b".")
        if select.select([sock], [], [], 0)[0]:
            if not sock.recv(1):
                return
            wait_until(engine.is_published, "it is not published")
            engine.check()
            sock.sendall(b"=")
            sock.recv(1)


def _write_edition_first(index, row, edition, key, digest):
    write, zero = Index.__dict__["right_write"], index.void
    index.editions[row] = edition
    index.void = lambda row: None
    write(index, row, edition, key, digest)
    index.void = zero


def plant(bug):
    """Let the processes that are forked have a bug."""
    if bug == "rows are leased without a word":
        Plane.renew = lambda plane, rows: None if plane.edition(rows[0] if rows else 0) else right_renew(plane, rows)
    elif bug == "the edition comes first":
        Index.right_write, Index.write = Index.write, _write_edition_first
    elif bug == "a part of larger rows has some behind its end":
        Shape.rows_of = _rows_behind_the_end


def _rows_behind_the_end(shape, part):
    rows = right_rows_of(shape, part)
    return rows if shape.row_stride == LAYOUT.row_stride else range(rows.start, min(rows.stop + 50, shape.num_rows))


right_renew, right_rows_of = Plane.renew, Shape.rows_of


def main():
    """Fork on request."""
    plant(sys.argv[2])
    requests = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for _ in itertools.count():
        data, fds, _, _ = socket.recv_fds(requests, 4096, 20)
        if not data:
            return
        pid = os.fork()
        if pid:
            for fd in fds:
                os.close(fd)
            requests.send(b"%d" % pid)
            continue
        requests.close()
        sock = socket.socket(fileno=fds[0])
        what, *rest = data.decode().split()
        try:
            {"keep": _keep, "live": _live}[what](sock, fds[1:], *rest)
        except BaseException:  # noqa: BLE001 -- the process ends
            traceback.print_exc()
            with contextlib.suppress(OSError):
                sock.sendall(b"!")
        finally:
            os._exit(1)


if __name__ == "__main__":
    main()
