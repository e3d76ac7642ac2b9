"""Shared memory: the memfd, one process's mapping of it, and the NUMA placement of its pages."""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import sys
import weakref
from typing import Literal, Protocol

from kvtiers.api import StartError
from kvtiers.region.limits import free_huge_pages

__all__ = [
    "DEFAULT_WINDOW",
    "HUGE_PAGE_BYTES",
    "MOST_NODES",
    "HugePages",
    "Mapping",
    "PrefaultMode",
    "bind_to_node",
    "create_memfd",
    "detach_in_children",
    "map_memory",
    "prefer_huge_pages",
    "prefer_node",
    "require_linux",
]

HugePages = Literal["off", "2MiB", "1GiB"]
PrefaultMode = Literal["ahead", "all", "off"]
DEFAULT_WINDOW = 32 << 30
"""Bytes that are ready ahead of use: room for a burst from a store as the first thing, or several seconds of what an
engine stores. The machine of an H100 populates them in two to five seconds and pins them in one."""
HUGE_PAGE_BYTES: dict[HugePages, int] = {"off": mmap.PAGESIZE, "2MiB": 2 << 20, "1GiB": 1 << 30}
MOST_NODES = 1024
"""As many NUMA nodes as Linux can be built for (CONFIG_NODES_SHIFT is at most 10)."""

_MFD_HUGE_SHIFT = 26
_MAP_FIXED, _MAP_NORESERVE, _MAP_FIXED_NOREPLACE = 0x10, 0x4000, 0x100000
_LEAST_FILLED = 64 << 10  # a hole that is smaller, beside memory that the child has already, stays a hole
_MAP_FAILED = ctypes.c_void_p(-1).value
_PROT_NONE, _READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_MADV_DONTFORK, _MADV_HUGEPAGE, _MADV_DONTDUMP = 10, 14, 16
_MPOL_PREFERRED = 1
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}
_SYS_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}

# mmap.mmap is not used: its close() is no answer to a tensor that forgot which buffer it came from (it would point
# into unmapped memory), and it keeps a hidden descriptor that a forked child would hold open for ever.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class _Holder(Protocol):
    def detach(self) -> None: ...


_holders: "weakref.WeakSet[_Holder]" = weakref.WeakSet()
_fork_hook: list[bool] = []


def detach_in_children(holder: _Holder) -> None:
    """Call ``holder.detach()`` in every forked child of this process.

    Descriptors close on exec, but a child that is forked without exec (``multiprocessing`` can do so) would hold
    them: the memory would outlive the engine, and no peer would see the engine's end. A child that a library forks
    in C runs no hook; it has no mapping either (``Mapping``), so it cannot write to rows with other chunks in them.
    """
    if not _fork_hook:
        _fork_hook.append(True)
        os.register_at_fork(after_in_child=_detach_all)
    _holders.add(holder)


def _detach_all() -> None:
    for holder in list(_holders):
        with contextlib.suppress(OSError):  # what one of them cannot close must not stay open in the others
            holder.detach()


def require_linux() -> None:
    """StartError, in one line with the way round it, where there is no memfd and no abstract socket."""
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        raise StartError(
            f"a shared region needs Linux (memfd, abstract sockets), and this is {sys.platform}; "
            "use an anonymous region: all ranks in one process, tiers with 'io: thread'"
        )


def create_memfd(name: str, nbytes: int, huge_pages: HugePages = "off") -> int:
    """Create ``nbytes`` of shareable memory without a name in any file system; return its descriptor.

    Its size is sealed: a peer that cut it off would kill the others at their next touch (SIGBUS).
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if huge_pages != "off":
        flags |= os.MFD_HUGETLB | (HUGE_PAGE_BYTES[huge_pages].bit_length() - 1) << _MFD_HUGE_SHIFT
    try:
        fd = os.memfd_create(name, flags)
    except OSError as error:
        where = "this machine has no huge pages of that size" if huge_pages != "off" else "memfd_create failed"
        raise StartError(f"no memory with huge_pages {huge_pages!r}: {where}: {error}") from None
    try:
        os.ftruncate(fd, nbytes)
        with contextlib.suppress(OSError):  # huge pages cannot be sealed before Linux 4.16
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError as error:
        os.close(fd)
        limit = "; the limit on file sizes (ulimit -f, LimitFSIZE=) is lower" if error.errno == errno.EFBIG else ""
        raise StartError(f"cannot make a memfd of {nbytes} bytes: {error}{limit}") from None
    return fd


class Mapping:
    """One process's mapping of ``nbytes``: of a memfd, or (``fd`` -1) of memory of its own.

    ``view``: the first ``view_bytes`` of it, flat, format "B", read-only unless ``writable``. The memory is unmapped
    when the last object that was made from the view is gone, never before. No forked child has a memfd's mapping,
    however it was forked. The memory is in no core file unless ``core_dumps``: prompts can be recovered from it.
    ``for_children``: buffers made from it stay usable in a forked child, where they are empty; else touching them there
    is a fault, since a store that is given zeros for a value's bytes would write them.
    """

    def __init__(
        self,
        fd: int,
        nbytes: int,
        view_bytes: int,
        *,
        core_dumps: bool = False,
        for_children: bool = True,
        writable: bool = True,
    ) -> None:
        if fd >= 0:
            self.address = _map_shared(fd, nbytes, _READ_WRITE if writable else mmap.PROT_READ)
        else:
            self.address = _map(None, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.nbytes = nbytes
        if not core_dumps:
            _libc.madvise(self.address, nbytes, _MADV_DONTDUMP)
        self._in_children = fd < 0 or _libc.madvise(self.address, nbytes, _MADV_DONTFORK) != 0
        self._is_private = fd < 0
        self._childrens_access = _READ_WRITE if for_children else _PROT_NONE
        exporter = (ctypes.c_ubyte * nbytes).from_address(self.address)
        # Not at exit: other threads, and a GPU, may still be using the memory while the interpreter goes down.
        weakref.finalize(exporter, _libc.munmap, self.address, nbytes).atexit = False
        self._exporter = weakref.ref(exporter)
        view = memoryview(exporter).cast("B")[:view_bytes]
        self._view: memoryview | None = view if writable else view.toreadonly()
        if fd >= 0:
            detach_in_children(self)

    @property
    def view(self) -> memoryview:
        """The mapped bytes. ValueError after ``close``."""
        if self._view is None:
            raise ValueError("the region is closed")
        return self._view

    def close(self) -> bool:
        """Drop the view; False if a buffer made from it is still alive, so that the memory stays mapped."""
        self._view = None
        return self._exporter() is None

    def detach(self) -> None:
        """Replace this mapping by private memory, in a forked child: empty, or without access (``for_children``)."""
        if self._exporter() is None or self._is_private:
            return
        if self._in_children:  # the kernel does not support the advice
            _map_private(self.address, self.nbytes, _MAP_FIXED, self._childrens_access)
        else:
            _fill_hole(self.address, self.nbytes, self._childrens_access)
        self._is_private = True  # a child of the child inherits it like any other memory


def _map(place: int | None, nbytes: int, flags: int, fd: int = -1, access: int = _READ_WRITE) -> int:
    address = _libc.mmap(place, nbytes, access, flags, fd, 0)
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(address)


def _map_shared(fd: int, nbytes: int, access: int) -> int:
    """Map a memfd where its huge pages, if it has any, are mapped whole: address and offset are multiples of theirs."""
    page = HUGE_PAGE_BYTES["2MiB"]
    if nbytes < page or os.fstat(fd).st_blksize > page:  # pages of 1 GiB: the kernel finds a place by itself
        return _map(None, nbytes, mmap.MAP_SHARED, fd, access)
    free = _map(None, nbytes + page, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, access=_PROT_NONE)
    place = -(-free // page) * page
    try:
        _map(place, nbytes, mmap.MAP_SHARED | _MAP_FIXED, fd, access)
    except OSError:
        _libc.munmap(free, nbytes + page)
        raise
    end = -(-(place + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    if place > free:
        _libc.munmap(free, place - free)
    if free + nbytes + page > end:
        _libc.munmap(end, free + nbytes + page - end)
    return place


def _map_private(address: int, nbytes: int, how: int, access: int) -> bool:
    """Map empty memory at this address; False if it is not there then."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | how
    found = _libc.mmap(address, nbytes, access, flags, -1, 0)
    if found not in {address, _MAP_FAILED}:  # a kernel before 4.17 takes the address as a hint
        _libc.munmap(found, nbytes)
    return bool(found == address)


def _fill_hole(address: int, nbytes: int, access: int) -> None:
    """Map empty memory where nothing is mapped: the child may have been given some of these addresses already."""
    if _map_private(address, nbytes, _MAP_FIXED_NOREPLACE, access) or nbytes <= _LEAST_FILLED:
        return
    half = nbytes // 2 // mmap.PAGESIZE * mmap.PAGESIZE
    _fill_hole(address, half, access)
    _fill_hole(address + half, nbytes - half, access)


def map_memory(
    fd: int,
    nbytes: int,
    view_bytes: int,
    huge_pages: HugePages = "off",
    *,
    core_dumps: bool = False,
    for_children: bool = True,
    writable: bool = True,
) -> Mapping:
    """Map a memfd (-1: memory of its own); StartError in one line if the memory, or the huge pages, are not there."""
    try:
        return Mapping(fd, nbytes, view_bytes, core_dumps=core_dumps, for_children=for_children, writable=writable)
    except OSError as error:
        if huge_pages == "off" or error.errno != errno.ENOMEM:
            raise StartError(f"cannot map {nbytes} bytes of the region: {error}") from None
        page = HUGE_PAGE_BYTES[huge_pages]
        pool = f"/sys/kernel/mm/hugepages/hugepages-{page // 1024}kB/nr_hugepages"
        raise StartError(
            f"the region needs {nbytes // page} huge pages of {huge_pages}, {free_huge_pages(page) or 0} are free; "
            f"reserve that many more in {pool} (as root), or set huge_pages: off"
        ) from None


def bind_to_node(mapping: Mapping, node: int) -> str | None:
    """Ask for pages of this NUMA node, before any page is touched; return a line why not, if it cannot be.

    Preferred, not bound: where the node is full the rest comes from another one, instead of an out-of-memory kill.
    """
    return _numa_call(_SYS_MBIND, node, ctypes.c_void_p(mapping.address), ctypes.c_ulong(mapping.nbytes))


def prefer_huge_pages(mapping: Mapping) -> None:
    """Ask the kernel for huge pages where it has some; none are reserved. Call it before any page is touched."""
    _libc.madvise(mapping.address, mapping.nbytes, _MADV_HUGEPAGE)


def prefer_node(node: int) -> str | None:
    """Set this thread, and what it starts, to take memory from this node first; return a line why not, if it cannot.

    Of huge pages ``bind_to_node`` reaches one process's mapping only, not those of the pre-fault program.
    """
    return _numa_call(_SYS_SET_MEMPOLICY, node)


def _numa_call(numbers: dict[str, int], node: int, *place: "ctypes.c_void_p | ctypes.c_ulong") -> str | None:
    number = numbers.get(platform.machine())
    if number is None or not sys.platform.startswith("linux"):
        return f"NUMA node {node}: placing memory is not supported on {platform.machine()}, {sys.platform}"
    if not 0 <= node < MOST_NODES:
        return f"NUMA node {node}: expected 0 to {MOST_NODES - 1}"
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    most = ctypes.c_ulong(len(mask) * bits + 1)  # the kernel reads one bit less than this number
    flags = (ctypes.c_ulong(0),) if place else ()
    if _libc.syscall(ctypes.c_long(number), *place, ctypes.c_long(_MPOL_PREFERRED), mask, most, *flags) == 0:
        return None
    return f"NUMA node {node}: {os.strerror(ctypes.get_errno())}; the memory lies anywhere"
