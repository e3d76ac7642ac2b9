"""The owner of the pre-fault program (``populate.py``): starts it, asks it for more, reads its progress, ends it."""

import contextlib
import errno
import mmap
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import IO

from kvtiers._process import KILLED_SECONDS, end, hand_over, lifeline, spawn_bare
from kvtiers.region import populate
from kvtiers.region.limits import oom_kills

__all__ = ["STOP_SECONDS", "Prefault"]

_THREADS = 4
_REAP_SECONDS = 5.0  # its output has ended, or it was killed: it ends soon
STOP_SECONDS = _REAP_SECONDS + KILLED_SECONDS
"""The most that ``stop`` takes, and the end that ``read`` comes to."""


class Prefault:
    """The running ``populate.py`` of one region. Used by one thread; another one of its own hands it the memory.

    ``wanted``: bytes from the region's start that it populates at first; ``want`` asks for more.
    ``populated``: bytes from the region's start. ``ended``: no more progress will come. ``error``: the memory is not
    there (an engine that used it would be killed); "" if the program was merely ended early, which costs speed only.
    ``piece_bytes``: populated by a thread at a stretch, a huge page at least.
    """

    program = Path(populate.__file__)
    piece_bytes = populate.PIECE_BYTES

    def __init__(self, fd: int, nbytes: int, page_bytes: int, wanted: int | None = None) -> None:
        self.nbytes = nbytes
        self.wanted = nbytes if wanted is None else min(wanted, nbytes)
        self.populated = 0
        self.ended = False
        self.error = ""
        self.method = ""
        self.remark = ""
        self.seconds = 0.0
        self._started = time.monotonic()
        self._oom_kills = oom_kills()
        self._unread = b""
        threads = min(_THREADS, os.cpu_count() or 1)
        piece_bytes = max(self.piece_bytes, page_bytes)
        collapse = populate.MADV_COLLAPSE if page_bytes == mmap.PAGESIZE else 0
        numbers = (os.getpid(), nbytes, piece_bytes, threads, populate.MADV_POPULATE_WRITE, collapse, self.wanted)
        self._memory = os.dup(fd)
        self._input, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = spawn_bare(self.program, [*map(str, numbers)], stdin=theirs.fileno())
        except OSError:
            self._input.close()
            self._close_memory()
            raise
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self._ends: list[socket.socket | IO[bytes]] = [self._input, self._output]
        os.set_blocking(self._output.fileno(), False)
        self._handing_over = threading.Lock()
        self._is_handed_over = False
        self._thread = threading.Thread(target=self._hand_over, name="kvtiers-prefault", daemon=True)
        try:
            self._ends.append(lifeline(self._process))
            self._thread.start()
        except (OSError, RuntimeError) as error:
            end(self._process, 0.0)
            self._close_pipes()
            self._close_memory()
            raise OSError(errno.EAGAIN, str(error)) from None

    @property
    def pid(self) -> int:
        """The program's process id."""
        return self._process.pid

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when there is progress to read."""
        return self._output.fileno()

    def want(self, nbytes: int) -> None:
        """Ask for this many bytes from the region's start. Never blocks; less than before changes nothing."""
        nbytes = min(nbytes, self.nbytes)
        with self._handing_over:
            if self.ended or nbytes <= self.wanted:
                return
            if not self._is_handed_over:  # it is asked for then
                self.wanted = nbytes
                return
            self._ask(nbytes)

    def _ask(self, nbytes: int) -> None:
        # A socket that is full belongs to a program that stands still, a broken one to one whose end will be read.
        with contextlib.suppress(BlockingIOError, ConnectionError):
            self._input.send(b"want %d\n" % nbytes)
            self.wanted = nbytes

    def _hand_over(self) -> None:
        """Give the program the memory as soon as it is tied to this process."""
        is_tied = hand_over(self._input, [self._memory])
        with self._handing_over:
            self._close_memory()
            if is_tied:
                self._input.setblocking(False)
                self._ask(self.wanted)
                self._is_handed_over = True

    def _close_memory(self) -> None:
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1

    def read(self) -> None:
        """Read what the program has reported. Never blocks, except at its end, to reap it."""
        try:
            data = os.read(self.fileno(), 65536)
        except BlockingIOError:
            return
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._take(line.decode(errors="replace"))
        if not data:
            self._end("")

    def _take(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        match word:
            case "populated":
                self.populated = int(rest)
            case "done":
                self.method = rest
            case "failed":
                self.error = rest
            case _:
                self.remark = line  # a traceback's last line

    def stop(self) -> None:
        """End the program if it still runs, reap it, and close both pipes. May be called again."""
        if not self.ended:
            self._process.kill()
            self._end("stopped")

    def _end(self, why: str) -> None:
        self.ended = True
        now = time.monotonic()
        self.seconds = now - self._started
        code = end(self._process, _REAP_SECONDS)
        # The program's end of the thread's socket is closed now, but for one that waits in the kernel.
        self._thread.join(max(0.0, now + STOP_SECONDS - time.monotonic()))
        self._close_pipes()
        if self.method or self.error:
            return
        if code == -signal.SIGKILL and not why and oom_kills() > self._oom_kills:
            # It is the first to go (populate.py): the next that touches such a row would be the engine.
            self.error = "the kernel has killed the pre-fault program, since memory ran out"
        else:
            killed = f"killed by signal {-code}" if code and code < 0 else ""
            self.remark = why or killed or self.remark or f"ended with status {code}"

    def _close_pipes(self) -> None:
        for each in self._ends:
            each.close()

    def detach(self) -> None:
        """Close our ends in a forked child, which has nothing to do with the program."""
        self._process.returncode = 0  # keeps Popen from waiting for a child that is not this process's
        self._close_pipes()
        self._close_memory()
