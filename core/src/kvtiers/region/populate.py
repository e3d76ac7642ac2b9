"""The pre-fault program: touches a new region's pages, front to back, so that no other process takes a page fault.

Run by its path, in a process of its own (``prefault.py`` starts it): the system call that does it would hold the
engine's interpreter for seconds. It imports little, so that it starts in a few hundredths of a second.

It gets the region's descriptor and nothing else, and populates as far as it is asked to: its arguments say how far at
first, each line ``want BYTES`` on standard input how far from then on. On standard output it says how far it came
(``populated BYTES``, then ``done METHOD`` or ``failed TEXT``). It ends when standard input does: with the process that
started it, and with that process also if it is stopped, when it could not see that.
"""

import ctypes
import errno
import mmap
import os
import sys
import threading
from collections.abc import Callable

MADV_POPULATE_WRITE = 23  # Linux 5.14
_MADV_HUGEPAGE = 14
PIECE_BYTES = 64 << 20
_LONGEST_LINE = 64
_PR_SET_PDEATHSIG, _SIGKILL = 1, 9  # signal.SIGKILL without what its module imports


class Populator:
    """Hands the region's pieces to threads in order, and reports the run of bytes from the start that is done."""

    def __init__(self, fd: int, nbytes: int, piece_bytes: int, advice: int, wanted: int | None = None) -> None:
        self._fd = fd
        self._region = mmap.mmap(fd, nbytes)
        if hasattr(mmap, "MADV_DONTDUMP"):
            self._region.madvise(mmap.MADV_DONTDUMP)  # a core file of this program is of use without the rows
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._region))
        self._nbytes = nbytes
        self._piece = piece_bytes
        self._advice = advice
        self._wanted = nbytes if wanted is None else wanted
        self._lock = threading.Condition()
        self._next = 0
        self._done: set[int] = set()
        self._reported = 0
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        # Only a hint, and never an error: huge pages may be switched off for shared memory.
        self._libc.madvise(self._address, nbytes, _MADV_HUGEPAGE)
        self.touched = False
        self.failure = ""

    def want(self, nbytes: int) -> None:
        """Populate this many bytes from the region's start; less than was asked for before changes nothing."""
        with self._lock:
            self._wanted = max(self._wanted, nbytes)
            self._lock.notify_all()

    def work(self) -> None:
        """Populate what is wanted, until nothing of the region is left or a piece has failed. Run by each thread."""
        while (start := self._next_piece()) is not None:
            try:
                self._populate(start, min(self._piece, self._nbytes - start))
            except OSError as error:
                with self._lock:
                    self.failure = f"at byte {start} of {self._nbytes}: {error}"
                    self._lock.notify_all()
                return
            self._report(start)

    def _next_piece(self) -> int | None:
        with self._lock:
            self._lock.wait_for(lambda: self.failure or self._next >= self._nbytes or self._next < self._wanted)
            if self.failure or self._next >= self._nbytes:
                return None
            start = self._next
            self._next += self._piece
            if self._next >= self._nbytes:
                self._lock.notify_all()  # for the threads that wait for more
            return start

    def _populate(self, start: int, length: int) -> None:
        while self._libc.madvise(self._address + start, length, self._advice):
            number = ctypes.get_errno()
            if number == errno.EINVAL:  # an older kernel; every other error means that the memory is not there
                self._touch(start, length)
                return
            if number not in {errno.EINTR, errno.EAGAIN}:
                raise OSError(number, os.strerror(number))

    def _touch(self, start: int, length: int) -> None:
        # No byte is written back: that would race with a rank that has already begun to use its rows. Allocating
        # keeps the kernel from dropping a page again that is still zeros, and reading clears and maps it now.
        self.touched = True
        os.posix_fallocate(self._fd, start, length)
        _ = self._region[start : start + length : mmap.PAGESIZE]

    def _report(self, start: int) -> None:
        with self._lock:
            self._done.add(start)
            while self._reported in self._done:
                self._done.remove(self._reported)
                self._reported += self._piece
            say(f"populated {min(self._reported, self._nbytes)}")


def say(line: str) -> None:
    """Write one line to standard output."""
    os.write(1, line.encode() + b"\n")


def end_with_parent(want: Callable[[int], None]) -> None:
    """Pass on what standard input asks for; at its end, end this process, whatever its other threads do."""
    unread = b""
    while data := os.read(0, 4096):
        *lines, unread = (unread + data).split(b"\n")
        unread = unread[-_LONGEST_LINE:]
        for line in lines:
            word, _, number = line.partition(b" ")
            if word == b"want" and number.isdigit():
                want(int(number))
    os._exit(1)


def be_the_first_to_go() -> None:
    """If memory runs out, let the kernel end this process and not the engine: no data is lost with it."""
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    except OSError:
        return
    try:
        os.write(fd, b"1000")
    except OSError:
        pass  # not allowed here: it was only a kindness
    finally:
        os.close(fd)


def main(arguments: list[str]) -> int:
    """Populate: descriptor, bytes, bytes a piece, threads, madvise's advice, bytes that are wanted at first."""
    fd, nbytes, piece_bytes, threads, advice, wanted = map(int, arguments)
    be_the_first_to_go()
    if sys.platform == "linux":  # the thread that started this lives until it has ended this
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    populator = Populator(fd, nbytes, piece_bytes, advice, wanted)
    threading.Thread(target=end_with_parent, args=(populator.want,), daemon=True).start()
    workers = [threading.Thread(target=populator.work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if populator.failure:
        say(f"failed {populator.failure}")
        return 1
    say("done touched" if populator.touched else "done populated")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
