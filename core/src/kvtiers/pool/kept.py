"""What the service manager keeps of a pool, for the keeper's next process: descriptors, by these names.

::

    kvtiers-rows                    once they are populated
    kvtiers-index-ARENA, -plane-    an arena's
    kvtiers-hello-ARENA             an arena's layout, in an engine's HELLO. It comes last and goes first: without it
                                    all of the arena counts for nothing
    kvtiers-process-PART-RANK       a pidfd for each process that is watched; rank -1: the engine's own

The pidfd of a process that has ended is let go by systemd itself (Linux 6.9), or by the next keeper.
"""

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvtiers.api import StartError
from kvtiers.pool.arena import Arena
from kvtiers.pool.descriptor_store import DescriptorStore
from kvtiers.pool.messages import POOL_FORMAT, Hello, decode_request, encode
from kvtiers.region.memfd import create_memfd

__all__ = ["Kept", "KeptArena", "KeptMemory"]

_OURS = "kvtiers-"
_ROWS, _INDEX, _PLANE, _HELLO, _PROCESS = (_OURS + name for name in ("rows", "index", "plane", "hello", "process-"))

_OF_ARENA = (_HELLO, _INDEX, _PLANE)


class KeptArena(NamedTuple):
    """The descriptors of index and plane, and a layout with chunks of the sizes that they are for, as JSON."""

    fds: tuple[int, int]
    layout: str


class Kept(NamedTuple):
    """What another process has left. The descriptors are those of ``KeptMemory``.

    ``processes``: pidfds, by the part whose engine the process is of, and its rank.
    """

    rows: int
    arenas: Sequence[KeptArena]
    processes: Mapping[tuple[int, int], int]


class KeptMemory:
    """A pool's memory in a descriptor store: what the process before this one has left there, and what this one has."""

    def __init__(self, store: DescriptorStore) -> None:
        self._store = store
        names = [name for name, _ in store.found]
        self._twice = sorted({name for name in names if name.startswith(_OURS) and names.count(name) > 1})
        self._found = {name: fd for name, fd in store.found if name.startswith(_OURS)}

    def found(self) -> Kept | None:
        """Return what was left, None if that is no memory; ValueError, OSError or StartError if it cannot be read."""
        if _ROWS not in self._found:
            return None
        if self._twice:  # one of two was to be dropped, and nothing says which
            raise StartError(f"there are two of {', '.join(self._twice)}")
        arenas = []
        for name in {name.removeprefix(of) for of in _OF_ARENA for name in self._found if name.startswith(of)}:
            if not {of + name for of in _OF_ARENA} <= self._found.keys():
                self._drop_arena(name)
                continue
            fd = self._found[_HELLO + name]
            hello = decode_request(os.pread(fd, os.fstat(fd).st_size, 0))
            if not isinstance(hello, Hello) or hello.format != POOL_FORMAT:
                raise StartError(f"it is of another format than {POOL_FORMAT}")
            arenas.append(KeptArena((self._found[_INDEX + name], self._found[_PLANE + name]), hello.layout))
        names = {fd: name.removeprefix(_PROCESS) for name, fd in self._found.items() if name.startswith(_PROCESS)}
        processes = {fd: name.split("-", 1) for fd, name in names.items()}
        return Kept(self._found[_ROWS], arenas, {(int(part), int(rank)): fd for fd, (part, rank) in processes.items()})

    def let_go(self) -> None:
        """Let nothing be kept of what was left. Its pages are free then, but for those that others have."""
        for name in self._found:
            self._store.drop(name)
        if self._found:
            self._store.settle()
        self.close()  # last: who closes the last descriptor frees the pages, which takes seconds

    def close(self) -> None:
        """Close what was left. May be called again."""
        for _, fd in self._store.found:
            os.close(fd)
        self._store.found, self._found = [], {}

    def keep_rows(self, fd: int) -> None:
        """Have these rows kept."""
        self._store.keep(_ROWS, fd)

    def drop_rows(self) -> None:
        """Have nothing kept from now on that a keeper could use."""
        self._store.drop(_ROWS)

    def keep_arena(self, arena: Arena) -> None:
        """Have this arena kept, in the place of one for such chunks."""
        self.drop_arena(arena)
        self._store.keep(f"{_INDEX}-{arena.name}", arena.index.fd)
        self._store.keep(f"{_PLANE}-{arena.name}", arena.plane.fd)
        hello = encode(Hello(POOL_FORMAT, "", arena.layout.to_json()))
        fd = create_memfd("kvtiers-pool-hello", len(hello))
        try:
            os.pwrite(fd, hello, 0)
            self._store.keep(f"{_HELLO}-{arena.name}", fd)
        finally:
            os.close(fd)

    def drop_arena(self, arena: Arena) -> None:
        """Have an arena kept no longer."""
        self._drop_arena(f"-{arena.name}")

    def _drop_arena(self, name: str) -> None:
        for of in _OF_ARENA:
            self._store.drop(of + name)

    def keep_process(self, part: int, rank: int, pidfd: int) -> None:
        """Have it kept that this process has a part."""
        self._store.keep(f"{_PROCESS}{part}-{rank}", pidfd)

    def drop_process(self, part: int, rank: int) -> None:
        """Record that it has not."""
        self._store.drop(f"{_PROCESS}{part}-{rank}")
