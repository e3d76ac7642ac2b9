"""The lending of a pool's memory: which engine has which part, and which part another one may have.

::

    no memory --> free --> lent --> reclaiming --> checking --> free       each part

    reclaiming  its engine's connection has ended; processes that had the part have not yet
    checking    all of them have; each of its rows that an entry counts for is hashed again

Memory that was kept by the service manager begins with reclaiming: whoever had a part may have it still.

Who had the memory is told by the kernel: each loan is a descriptor of its own of the rows, with a lock on it that is
there as long as any process has it open or mapped, ranks and tier hosts alike. A GPU's copies may go on a little
longer, until the last descriptor of a dead rank is closed: so ranks, and the engine, are also watched by pidfd.
"""

import contextlib
import logging
import os
import selectors
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvtiers.api import KvtiersError
from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.pool.keeper_memory import KeeperMemory
from kvtiers.pool.memory import MOST_PARTS
from kvtiers.pool.messages import Wait
from kvtiers.pool.peer import Peer, are_of_one_process, pid_of
from kvtiers.region.handshake import process_name

__all__ = ["UNUSABLE", "Lending"]

_log = logging.getLogger("kvtiers.pool")
UNUSABLE = (
    ValueError,
    ArithmeticError,
    LookupError,
    TypeError,
    AttributeError,
    RuntimeError,
    MemoryError,
    OSError,
    struct.error,
    KvtiersError,
)
"""What a message, or what was kept, may raise, whatever is in it. It must not end the keeper."""


class Lending:
    """Lends the parts of a pool's memory to engines, and takes them back: one thread's, the keeper's.

    ``selector``: watches the engines' processes, and what populates the memory. ``hear_out``: takes what an engine has
    sent, and closes its connection.
    """

    def __init__(
        self, memory: KeeperMemory, selector: selectors.BaseSelector, hear_out: Callable[[Peer], None]
    ) -> None:
        self._memory = memory
        self._selector = selector
        self._hear_out = hear_out
        self._engines: dict[int, Peer] = {}
        """By part: who has it, or had it, and is not known to have it no longer."""
        self.admitted = 0
        """How many engines have been lent a part."""

    def has_part(self, peer: Peer) -> bool:
        """Return whether this engine has a part, as far as is known."""
        return self._engines.get(peer.part) is peer

    def close(self) -> None:
        """Hang up on all engines that have a part, and watch none."""
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    # The memory comes.

    def make_memory(self) -> None:
        """Begin to make the memory, as ``KeeperMemory.make`` says."""
        memory = self._memory
        memory.make()
        if memory.prefault is not None:
            fd = memory.prefault.fileno()
            self._selector.register(
                fd, selectors.EVENT_READ, lambda: memory.populate() and self._selector.unregister(fd)
            )

    def take_back(self) -> None:
        """Take the memory that the service manager has kept; let it go, in one line, where it cannot be used."""
        memory = self._memory
        try:
            if (kept := memory.kept.found()) is not None:
                memory.take_back(kept)
                known = {part for part, _ in kept.processes if part < MOST_PARTS}
                for part in known | set(range(memory.parts)):  # its engine, or somebody unknown, may have it still
                    self._await(part, {rank: fd for (of, rank), fd in kept.processes.items() if of == part})
                memory.kept.close()
                return
        except UNUSABLE as error:
            _log.warning("pool: the memory that the service manager has kept is let go: %s", error)
            self.close()
            memory.drop()
        memory.kept.let_go()

    def _await(self, part: int, pidfds: Mapping[int, int]) -> None:
        """Take it that an engine of another keeper may have this part. ``pidfds``: the caller's, of its processes."""
        before = self._engines[part] = Peer(self._selector, pid_of(pidfds[-1]) if -1 in pidfds else 0)
        before.part = part
        for rank, pidfd in pidfds.items():
            self._watch(before, rank, os.dup(pidfd))

    def _find_holders(self) -> None:
        """Take it that an engine of another keeper has each part that is lent, nobody knows to whom."""
        rows = self._memory.rows
        for part in range(MOST_PARTS):  # it may have other memory in mind: of more parts than are asked for now
            if rows is not None and part not in self._engines and rows.is_lent(part):
                self._await(part, {})

    def take_over(self, engine: Peer, fds: Sequence[int]) -> str:
        """Let an engine keep the part that it brings back of another keeper; return why not, "" if it is done.

        ``fds``: rows, index and plane, and the pidfds of its ranks and hosts. They stay the caller's.
        """
        hello, layout = engine.hello, engine.layout
        assert hello is not None
        assert layout is not None
        if why := self._adopt(hello.part, hello.prefix, layout, fds[:3]):
            return why
        for rank, pidfd in zip(hello.watched, fds[3:], strict=False):
            self._watch(engine, rank, os.dup(pidfd))
        self._take_part(engine, hello.part)
        return ""

    def _adopt(self, part: int, prefix: str, layout: CacheLayout, fds: Sequence[int]) -> str:
        if len(fds) != 3:
            return "it brings no memory"
        memory, before = self._memory, list(self._memory.arenas)
        self._find_holders()
        if memory.has(fds[0]) and part in self._engines:
            self._hear_out(self._engines[part])
            arena = memory.take_arena(layout, fds[1:])
        elif self._engines or memory.arenas:  # it has been lent
            return "this keeper has other memory by now"
        else:  # made a moment ago, or about to be: that of an engine is worth more
            if memory.prefault is not None:
                self._selector.unregister(memory.prefault.fileno())
            arena = memory.adopt(layout, fds)
        self._find_holders()
        for other in arena.parts if arena not in before else ():
            if other != part and other not in self._engines:
                memory.begin_check(other)  # its engine has ended while there was no keeper
        if not 0 <= part < memory.parts or memory.arena_of(part) not in {None, arena}:
            return "it brings a part that there is not"
        arena.rename(part, prefix)
        return ""

    # Engines come.

    def why_wait(self, layout: CacheLayout) -> Wait | None:
        """Return what an engine of this layout waits for; None if it can have a part, or be refused."""
        self._find_holders()
        engines = list(self._engines.values())
        if self._memory.rows is None:
            return Wait("it is not populated yet", ends=True)
        if self._parts_for(layout):
            return None
        if self._parts_for(layout, soon=True):
            for holder in engines:
                if holder.is_leaving:
                    return Wait(f"{holder.name} has its memory", ends=True)
            return Wait("its rows are being checked", ends=True)
        has = f"{', '.join(engine.name for engine in engines)} {'has' if len(engines) == 1 else 'have'}"
        rest = "" if len(engines) >= self._memory.parts else "; what is free is of models at work"
        return Wait(f"{has} its memory{rest}", ends=False)

    def _parts_for(self, layout: CacheLayout, *, soon: bool = False) -> list[int]:
        """Return the parts that an engine of this layout may have, or may have soon, as far as is known.

        Those of its arena that no engine has, and those of arenas of which no engine has any: what else is in an arena
        is read by its engines. While an engine has a part of an arena that it is still to bring, that may be any of the
        others', and a part that is in no arena may be in it.
        """
        memory, own = self._memory, self._memory.arena_for(layout)
        engines = {part: engine for part, engine in self._engines.items() if not (soon and engine.is_leaving)}
        at_work = {memory.arena_of(part) for part in engines}
        free = [part for part in range(memory.parts) if part not in engines and (soon or not memory.is_checking(part))]
        arenas = {part: memory.arena_of(part) for part in free}
        if None in at_work:
            return [part for part, arena in arenas.items() if arena is own and own is not None]
        return [part for part, arena in arenas.items() if arena is own or arena not in at_work]

    @contextlib.contextmanager
    def lend(self, engine: Peer) -> Iterator[Sequence[int]]:
        """Lend an engine that need not wait a part; its descriptors are open until the end of the block."""
        hello, layout = engine.hello, engine.layout
        assert hello is not None
        assert layout is not None
        part = max(self._parts_for(layout), key=lambda part: self._worth(part, layout, hello.prefix))
        arena = self._memory.give(part, layout, hello.prefix)
        with arena.lent(part) as fds:
            self._take_part(engine, part)
            _log.info("pool: lent to %s, with %d chunks", engine.name, len(arena.counting(part)))
            yield fds

    def _worth(self, part: int, layout: CacheLayout, prefix: str) -> tuple[int, int]:
        """Return what a part is worth to an engine: the chunks that it finds there; others count against it.

        Those of another arena the more, the later its last engine has ended.
        """
        memory, arena = self._memory, self._memory.arena_of(part)
        chunks = len(memory.counting(part))
        if arena is None or arena is memory.arena_for(layout):
            return 1, chunks if arena is not None and arena.prefix(part) == prefix else -chunks
        return -memory.arenas.index(arena), -chunks

    def _take_part(self, engine: Peer, part: int) -> None:
        """Record that this engine has a part, or is about to: the processes that it has named, and no others."""
        before, self._engines[part], engine.part = self._engines.get(part), engine, part
        known = before.pidfds if before is not None else {}
        for rank, pidfd in engine.pidfds.items():
            if rank not in known or not are_of_one_process(known[rank], pidfd):
                self._memory.kept.keep_process(part, rank, pidfd)
        for rank in known.keys() - engine.pidfds.keys():
            self._memory.kept.drop_process(part, rank)
        if before is None or before.hello is None:  # else it is the same engine, by another connection
            self.admitted += 1
        if before is not None:
            before.close()

    # Engines go.

    def watch(self, engine: Peer, rank: int, pidfd: int) -> None:
        """Take the part back only after this process has ended, too. Takes over the pidfd; OSError if it is none."""
        self._watch(engine, rank, pidfd)
        if self.has_part(engine):
            self._memory.kept.keep_process(engine.part, rank, pidfd)

    def _watch(self, engine: Peer, rank: int, pidfd: int) -> None:
        engine.watch(rank, pidfd, lambda: self._on_exit(engine, rank))

    def unwatch(self, engine: Peer, rank: int) -> None:
        """Record that the process of this rank has the part no longer."""
        if engine.unwatch(rank) and self.has_part(engine):
            self._memory.kept.drop_process(engine.part, rank)

    def _on_exit(self, engine: Peer, rank: int) -> None:
        if not engine.has_ended(rank):
            return  # of the process that was this rank before, and seen a moment before
        if rank == -1:
            self._hear_out(engine)  # what it sent before its end is true
        self.unwatch(engine, rank)

    def withdraw(self, engine: Peer) -> None:
        """Take it that an engine was lent no part: it has not got the descriptors."""
        for rank in list(engine.pidfds):
            self.unwatch(engine, rank)
        del self._engines[engine.part]
        self.admitted -= 1

    @property
    def is_ending(self) -> bool:
        """Whether ``reclaim`` is to be called soon: nothing tells when the last process has no part any more."""
        return any(engine.has_left for engine in self._engines.values())

    def reclaim(self) -> None:
        """Take each part back once no process has it, and nothing is under way to it; check what is in it."""
        rows = self._memory.rows
        for part, engine in list(self._engines.items()):
            if engine.has_left and rows is not None and not rows.is_lent(part):
                del self._engines[part]
                _log.info("pool: %s has ended, and all that had its memory", engine.name)
                self._memory.begin_check(part)

    # Anybody asks.

    def holders(self) -> str:
        """Return what the processes that have a part are called, "" if no engine has any."""
        if not self._engines:
            return ""
        pids = [each["pid"] for engine in self._engines.values() for each in engine.processes()]
        return ", ".join(map(process_name, pids)) or "a process that is not watched"

    def figures(self) -> dict[str, Any]:
        """Return what ``kvtiers pool status`` shows of the memory, and of who has it."""
        found = self._memory.figures()
        for part, figures in enumerate(found["parts"]):
            figures.update(_figures_of(self._engines.get(part)))
        return found


def _figures_of(engine: Peer | None) -> dict[str, Any]:
    return {
        "lent": engine is not None,
        "engine": engine.pid if engine is not None else 0,
        "engine_connected": engine is not None and engine.sock is not None,
        "watched": len(engine.pidfds) if engine is not None else 0,
        "processes": engine.processes() if engine is not None else [],
    }
