"""The pre-fault program: touches a new region's pages, front to back, so that no other process takes a page fault.

Run by its path, in a process of its own (``prefault.py`` starts it): the system call that does it would hold the
engine's interpreter for seconds. It imports little, so that it starts in a few hundredths of a second.

Its standard input is a socket. There it says that it is tied to its parent's life, and gets the region's descriptor,
which it must not have before: one that is stopped too early outlives a parent that is killed. It populates as far as
it is asked to: its arguments say how far at first, each line ``want BYTES`` on standard input how far from then on.
What is asked for later is far ahead of use, and tier hosts may be loading meanwhile: fewer threads do it, at a lower
priority. On standard output it reports how far it has come (``populated BYTES``, then ``done METHOD`` or
``failed TEXT``). It ends at the end of standard input, which comes when the process that started it has ended.
"""

import ctypes
import errno
import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Callable

MADV_POPULATE_WRITE = 23  # Linux 5.14
MADV_COLLAPSE = 25  # Linux 6.1
_MADV_HUGEPAGE = 14
PIECE_BYTES = 64 << 20
_HUGE_BYTES = 2 << 20
_MOST_REFUSALS = 4
_FOLLOWERS, _FOLLOWERS_NICE = 2, 10
_SLOWEST_COLLAPSE = 256 << 20  # bytes a second and thread: the kernel compacts memory for each page
_LONGEST_LINE = 64
_MAP_FIXED, _MAP_FAILED = 0x10, ctypes.c_void_p(-1).value
_PR_SET_PDEATHSIG, _SIGKILL = 1, 9  # signal.SIGKILL without what its module imports


class Populator:
    """Hands the region's pieces to threads in order, and reports the run of bytes from the start that is done.

    ``collapse``: the advice that makes huge pages; 0: none. Huge pages are populated several times as fast as small
    ones, pinned twice as fast, and need no privilege and no setting of the machine, except that ``shmem_enabled`` must
    not be ``deny``. Where the kernel has none to give, small pages take their place.
    """

    def __init__(
        self, fd: int, nbytes: int, piece_bytes: int, advice: int, wanted: int | None = None, collapse: int = 0
    ) -> None:
        self._fd = fd
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._address = self._map(nbytes, _HUGE_BYTES if collapse else 0)
        self._region = memoryview((ctypes.c_ubyte * nbytes).from_address(self._address)).cast("B")
        if hasattr(mmap, "MADV_DONTDUMP"):  # a core file of this program is of use without the rows
            self._libc.madvise(self._address, nbytes, mmap.MADV_DONTDUMP)
        self._nbytes = nbytes
        self._piece = piece_bytes
        self._advice = advice
        self._collapse_advice = collapse
        self._refusals = 0
        self._wanted = self._at_first = nbytes if wanted is None else wanted
        self._lock = threading.Condition()
        self._next = 0
        self._done: set[int] = set()
        self._reported = 0
        # Only a hint, and never an error: huge pages may be switched off for shared memory.
        self._libc.madvise(self._address, nbytes, _MADV_HUGEPAGE)
        self.touched = False
        self.failure = ""

    def _map(self, nbytes: int, alignment: int) -> int:
        """Map the region, at a multiple of ``alignment``; return its address. It stays mapped until the process ends.

        A huge page is possible where address and offset in the memfd are multiples of its size.
        """
        place, flags = None, mmap.MAP_SHARED
        if alignment:
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            free = self._checked(self._libc.mmap(None, nbytes + alignment, 0, private, -1, 0))
            place, flags = -(-free // alignment) * alignment, flags | _MAP_FIXED
        return self._checked(self._libc.mmap(place, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, self._fd, 0))

    @staticmethod
    def _checked(address: int) -> int:
        if address == _MAP_FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return address

    def want(self, nbytes: int) -> None:
        """Populate this many bytes from the region's start; less than was asked for before changes nothing."""
        with self._lock:
            self._wanted = max(self._wanted, nbytes)
            self._lock.notify_all()

    def work(self, number: int = 0) -> None:
        """Populate what is wanted, until nothing of the region is left or a piece has failed. Run by each thread.

        ``number``: of this thread among the populating ones. The first ones also populate what ``want`` adds later, the
        others end with what was wanted at the start.
        """
        gives_way = False
        while (start := self._next_piece(follows=number < _FOLLOWERS)) is not None:
            if start >= self._at_first and not gives_way:
                gives_way = True
                os.nice(_FOLLOWERS_NICE)  # this thread's alone
            try:
                self._populate(start, min(self._piece, self._nbytes - start))
            except OSError as error:
                with self._lock:
                    self.failure = f"at byte {start} of {self._nbytes}: {error}"
                    self._lock.notify_all()
                return
            self._report(start)

    def _next_piece(self, *, follows: bool = True) -> int | None:
        end = self._nbytes if follows else min(self._at_first, self._nbytes)
        with self._lock:
            self._lock.wait_for(lambda: self.failure or self._next >= end or self._next < self._wanted)
            if self.failure or self._next >= end:
                return None
            start = self._next
            self._next += self._piece
            if self._next >= self._at_first:
                self._lock.notify_all()  # for the threads that wait for more
            return start

    def _populate(self, start: int, length: int) -> None:
        if self._collapse_advice:
            self._collapse(start, length)
        while self._libc.madvise(self._address + start, length, self._advice):
            number = ctypes.get_errno()
            if number == errno.EINVAL:  # an older kernel; every other error means that the memory is not there
                self._touch(start, length)
                return
            if number not in {errno.EINTR, errno.EAGAIN}:
                raise OSError(number, os.strerror(number))

    def _collapse(self, start: int, length: int) -> None:
        """Make huge pages of this piece; what that leaves out is populated afterwards as small ones."""
        first = -(-(self._address + start) // _HUGE_BYTES) * _HUGE_BYTES - self._address
        whole = (start + length - first) // _HUGE_BYTES * _HUGE_BYTES
        if whole <= 0:
            return
        # One page of each must be there already: an empty range is refused.
        for place in range(first, first + whole, _HUGE_BYTES):
            os.posix_fallocate(self._fd, place, mmap.PAGESIZE)
        begun = time.monotonic()
        refused = self._libc.madvise(self._address + first, whole, self._collapse_advice)
        number = ctypes.get_errno() if refused else 0
        took = time.monotonic() - begun
        with self._lock:
            self._refusals += bool(refused) or took > whole / _SLOWEST_COLLAPSE
            if number == errno.EINVAL or self._refusals >= _MOST_REFUSALS:  # an older kernel, or fragmented memory
                self._collapse_advice = 0

    def _touch(self, start: int, length: int) -> None:
        # No byte is written back: that would race with a rank that has already begun to use its rows. Allocating
        # keeps the kernel from dropping a page again that is still zeros, and reading clears and maps it now.
        self.touched = True
        os.posix_fallocate(self._fd, start, length)
        bytes(self._region[start : start + length : mmap.PAGESIZE])

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


def read_input() -> bytes:
    """Return what comes next on standard input; b"" at its end."""
    try:
        return os.read(0, 4096)
    except ConnectionError:  # the parent has ended, and left something unread
        return b""


def receive_memory() -> int:
    """Say that this program is tied to its parent, and return the region's descriptor; end where the parent has."""
    parent = socket.socket(fileno=os.dup(0))
    try:
        parent.send(b".")
        [fd] = socket.recv_fds(parent, 1, 1)[1]
    except (OSError, ValueError):
        os._exit(1)
    finally:
        parent.close()
    return fd


def end_with_parent(want: Callable[[int], None]) -> None:
    """Call ``want`` for each request on standard input; at its end, end this process, whatever its other threads do."""
    unread = b""
    while data := read_input():
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
    """Populate: the parent's id, bytes, bytes a piece, threads, two of madvise's advices, bytes wanted at first."""
    parent, nbytes, piece_bytes, threads, advice, collapse, wanted = map(int, arguments)
    if sys.platform == "linux":  # the thread that started this lives until it has ended this
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the signal was armed
        return 1
    be_the_first_to_go()
    fd = receive_memory()
    populator = Populator(fd, nbytes, piece_bytes, advice, wanted, collapse)
    threading.Thread(target=end_with_parent, args=(populator.want,), daemon=True).start()
    workers = [threading.Thread(target=populator.work, args=(number,)) for number in range(threads)]
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
