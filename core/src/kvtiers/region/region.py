"""The region: the primary tier's memory, rows that the engine's scheduler, its workers and the tier hosts all map.

Who may do what, and on which thread: ``create``, ``poll``, ``close`` and all attributes belong to the thread that
drives the manager; ``wait_ready`` may be called from any. The accept thread (``server.py``) only posts events.
"""

import contextlib
import logging
import os
import time
import uuid
from functools import partial

from kvtiers.api import StartError
from kvtiers.api.units import format_size
from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.region.early_memory import EarlyMemory, LentMemory
from kvtiers.region.handshake import listen, plain_id
from kvtiers.region.limits import memory_problem
from kvtiers.region.memfd import (
    DEFAULT_WINDOW,
    HUGE_PAGE_BYTES,
    HugePages,
    Mapping,
    PrefaultMode,
    bind_to_node,
    create_memfd,
    detach_in_children,
    map_memory,
    prefer_huge_pages,
    prefer_node,
)
from kvtiers.region.prefault import Prefault
from kvtiers.region.ranks import (
    PrefaultEnded,
    RankGone,
    RankJoined,
    RankLost,
    RankTable,
    RegionEvent,
)
from kvtiers.region.server import AcceptThread
from kvtiers.region.state import Desk, RegionState

__all__ = [
    "AnonymousRegion",
    "OffloadRegion",
    "PrefaultEnded",
    "RankGone",
    "RankJoined",
    "RankLost",
    "RegionEvent",
    "SharedOffloadRegion",
]

_SLOWEST_PINNING = 256 << 20
"""Bytes a second that populating and pinning are waited for with ``prefault="all"``, once all ranks have joined."""
_FIRST_BYTES = 4 << 30  # so much KV takes an H100 a second to compute, for a model of 8 billion parameters
_FOLLOWING_STEPS = 16  # of a window: how often the pre-fault program is asked for more

_log = logging.getLogger("kvtiers.region")


class OffloadRegion:
    """Rows of memory, and the state of the ranks that map them. Made by a subclass's ``create``."""

    def __init__(self, engine_id: str, layout: CacheLayout, num_rows: int, mapping: Mapping) -> None:
        self.engine_id = engine_id
        self.layout = layout
        self.num_rows = num_rows
        self.row_stride = layout.row_stride
        self._mapping = mapping
        self._closed = False

    @property
    def view(self) -> memoryview:
        """All rows, flat, writable, format "B": row i starts at byte ``i * row_stride``. ValueError after ``close``."""
        return self._mapping.view

    @property
    def map_bytes(self) -> int:
        """Bytes to map: the rows, rounded up to whole pages."""
        return self._mapping.nbytes

    @property
    def fd(self) -> int | None:
        """The memfd, to be handed over to tier hosts; None where no other process can map the region."""
        return None

    @property
    def all_joined(self) -> bool:
        """Every rank has joined, and none has been lost."""
        return not self._closed

    @property
    def all_ready(self) -> bool:
        """Every rank has joined, and with ``prefault="all"`` all memory is populated and pinned."""
        return self.all_joined

    @property
    def lost_ranks(self) -> set[int]:
        """Ranks whose connection has ended, but of which something may still touch the rows."""
        return set()

    @property
    def populated_rows(self) -> int:
        """Rows, from the first, whose memory is there already. The others are only slower at their first use."""
        return 0

    @property
    def pinned_rows(self) -> int:
        """Rows, from the first, that every rank which pins has pinned by now; all of them once none pins any more."""
        return self.num_rows

    @property
    def timings(self) -> dict[str, float]:
        """Seconds of ``create``, ``join`` (until all ranks were there) and ``prefault``, as far as they are known."""
        return {}

    def follow(self, rows: int) -> int:
        """Have the next window of memory populated, since the first ``rows`` rows are in use. Never blocks.

        Return how many rows have to be in use when this is to be called next; more than there are rows: never again.
        """
        del rows
        return self.num_rows + 1

    def has_events(self) -> bool:
        """Return whether something happened since the last ``poll``."""
        return False

    def poll(self, timeout: float = 0.0) -> list[RegionEvent]:
        """Return what happened since the last call, in order. Blocks only if a ``timeout`` is given."""
        del timeout
        return []

    def wait_ready(self, timeout: float | None = None) -> None:
        """Block until all ranks have joined; StartError that names the missing or refused ones."""

    def wait_window(self, timeout: float, first_bytes: int = _FIRST_BYTES) -> bool:
        """Return True: this region's memory is not pinned, so there is nothing to wait for."""
        del timeout, first_bytes
        return True

    def close(self) -> None:
        """Release the memory. A buffer that is still in use keeps it mapped, with a warning. May be called again."""
        if self._closed:
            return
        self._closed = True
        if not self._mapping.close():
            _log.warning(
                "%s: a buffer made from its view is still in use; its memory stays mapped until that is released",
                self,
            )

    def __str__(self) -> str:
        return f"region of engine {self.engine_id!r}"


class SharedOffloadRegion(OffloadRegion):
    """A region in a memfd, which other processes join by the engine's id. Linux only."""

    def __init__(
        self,
        engine_id: str,
        layout: CacheLayout,
        num_rows: int,
        mapping: Mapping,
        memfd: int,
        ranks: RankTable,
        server: AcceptThread,
        start_deadline: float,
        window_rows: int,
    ) -> None:
        super().__init__(engine_id, layout, num_rows, mapping)
        self._window_rows = window_rows
        self._memfd = memfd
        self._ranks = ranks
        self._server = server
        self._start_deadline = start_deadline
        self._created = time.monotonic()
        detach_in_children(self)

    @classmethod
    def create(
        cls,
        engine_id: str,
        layout: CacheLayout,
        capacity_bytes: int,
        *,
        huge_pages: HugePages = "off",
        numa_node: int | None = None,
        prefault: PrefaultMode = "ahead",
        prefault_window: int = DEFAULT_WINDOW,
        start_deadline: float = 60.0,
        world_size: int | None = None,
        core_dumps: bool = False,
        memory: EarlyMemory | LentMemory | None = None,
    ) -> "SharedOffloadRegion":
        """Make the region, begin to let ranks in and to pre-fault, and return at once.

        ``prefault``: "ahead" populates ``prefault_window`` bytes, and keeps as many ahead of the rows given to
        ``follow``; "all" populates all rows, and the region is ready when the ranks have pinned them; "off" none.

        StartError, in one line, if the engine id is in use, the memory or the huge pages are not there, a row does
        not fit into ``capacity_bytes``, or this system has no memfd. ``world_size``: how many ranks to wait for, by
        default the layout's. ``core_dumps``: a core file of this process has the rows in it. ``memory``: created
        earlier for this capacity and these options; the region takes ownership of it. Of lent memory, which has its
        pages already, the region is ready when the ranks have pinned it.
        """
        started = time.monotonic()
        where = f"region of engine {engine_id!r}"
        num_rows = _rows_in(where, capacity_bytes, layout)
        page = HUGE_PAGE_BYTES[huge_pages]
        map_bytes = memory.nbytes if memory is not None else -(-num_rows * layout.row_stride // page) * page
        with contextlib.ExitStack() as undo:
            listener = listen(engine_id)  # first: the error for a second engine of this id names the id, not memory
            undo.callback(listener.close)
            lender: LentMemory | None = None
            if isinstance(memory, EarlyMemory):
                memfd, early = memory.take()
            elif memory is not None:
                lender, memfd, early = memory, memory.take_rows(), None
            else:
                memfd, early = _make_memory(where, engine_id, map_bytes, huge_pages), None
            undo.callback(os.close, memfd)
            if early is not None:
                undo.callback(early.stop)
            used = num_rows * layout.row_stride
            mapping = map_memory(memfd, map_bytes, used, huge_pages, core_dumps=core_dumps)
            prefer_huge_pages(mapping)
            if numa_node is not None and lender is None and (trouble := bind_to_node(mapping, numa_node)):
                _log.warning("%s: %s", where, trouble)
            ranks = RankTable(where, world_size or layout.world_size, settled_first=bool(lender) or prefault == "all")
            off = prefault == "off" or lender is not None
            name = f"kvtiers-{plain_id(engine_id)}"
            state = RegionState.create(f"{name}-state", num_rows, layout.row_stride, map_bytes)
            undo.callback(state.close)
            desks = []
            for rank in range(ranks.world_size):
                desks.append(Desk.create(f"{name}-desk-{rank}"))
                undo.callback(desks[rank].close)
            wanted = min(prefault_window, map_bytes) if prefault == "ahead" else map_bytes
            launch = None if off else partial(_start_prefault, memfd, map_bytes, page, numa_node, wanted, early)
            server = AcceptThread(listener, memfd, layout, state, desks, ranks, launch, start_deadline, lender)
            server.start()
            undo.pop_all()
        server.timings["create"] = seconds = time.monotonic() - started
        _log.info("%s: %d rows of %s in %.3f s", where, num_rows, format_size(layout.row_stride), seconds)
        window_rows = num_rows if off or wanted == map_bytes else wanted // layout.row_stride
        return cls(engine_id, layout, num_rows, mapping, memfd, ranks, server, start_deadline, window_rows)

    @property
    def fd(self) -> int | None:
        """The memfd, to be handed over to tier hosts; None after ``close``."""
        return None if self._closed else self._memfd

    @property
    def all_joined(self) -> bool:
        """Every rank has joined, and none has been lost."""
        return self._ranks.all_joined and not self._closed

    @property
    def all_ready(self) -> bool:
        """Every rank has joined, and with ``prefault="all"`` all memory is populated and pinned.

        Never again once memory turned out not to be there: ``poll`` says which rows have theirs.
        """
        return self._ranks.all_ready and not self._closed

    @property
    def lost_ranks(self) -> set[int]:
        """Ranks whose connection has ended, but of which something may still touch the rows."""
        return set() if self._closed else self._ranks.lost

    def follow(self, rows: int) -> int:
        """Have the next window of memory populated, since the first ``rows`` rows are in use. Never blocks."""
        ahead = rows + self._window_rows
        if self._window_rows < self.num_rows:
            self._server.want_rows(min(ahead, self.num_rows))
        return rows + max(1, self._window_rows // _FOLLOWING_STEPS) if ahead < self.num_rows else self.num_rows + 1

    @property
    def populated_rows(self) -> int:
        """Rows, from the first, whose memory is there already."""
        return self._server.populated_rows

    @property
    def pinned_rows(self) -> int:
        """Rows, from the first, that every rank which pins has pinned by now; all of them once none pins any more."""
        least = self._ranks.least_pinned
        return self.num_rows if least is None else min(least, self.num_rows)

    @property
    def timings(self) -> dict[str, float]:
        """Seconds of ``create``, ``join`` (until all were there), ``prefault``; ``populated_rows``; as far as known."""
        return self._server.timings

    def has_events(self) -> bool:
        """Return whether something happened since the last ``poll``."""
        return not self._ranks.are_quiet()

    def poll(self, timeout: float = 0.0) -> list[RegionEvent]:
        """Return what happened since the last call, in order. Blocks only if a ``timeout`` is given."""
        return self._ranks.take_events(timeout)

    def wait_ready(self, timeout: float | None = None) -> None:
        """Block until all is ready; StartError that names the missing or refused ranks.

        ``timeout``: seconds from now for the ranks to join; by default what is left of ``start_deadline``. With
        ``prefault="all"`` as long again as the memory can take at its slowest.
        """
        left = max(0.0, self._created + self._start_deadline - time.monotonic())
        self._ranks.wait_all(left if timeout is None else timeout, self.map_bytes / _SLOWEST_PINNING)

    def wait_window(self, timeout: float, first_bytes: int = _FIRST_BYTES) -> bool:
        """Block until all ranks have pinned the memory that the first requests use; return whether that came in time.

        ``first_bytes``: what they use at most. The rest is pinned beside them, which they hardly feel.
        """
        most = self._window_rows - self._window_rows // _FOLLOWING_STEPS  # a piece beyond populated rows is not pinned
        return self._ranks.wait_pinned(min(most, max(1, first_bytes // self.row_stride)), timeout)

    def close(self) -> None:
        """Disconnect the ranks, end pre-faulting and release the memory. May be called again."""
        if self._closed:
            return
        self._ranks.break_off("it was closed")  # for a thread that waits in wait_ready
        self._server.stop()
        os.close(self._memfd)
        super().close()

    def detach(self) -> None:
        """Close the memfd in a forked child, where this region counts as closed. Its other parts do the same."""
        if not self._closed:
            self._closed = True
            os.close(self._memfd)


class AnonymousRegion(OffloadRegion):
    """A region in this process's own memory: for tests, for ``kvtiers check``, and for systems without memfd.

    Workers and tier hosts in other processes cannot use it, so tiers need ``io: thread``.
    """

    @classmethod
    def create(
        cls,
        layout: CacheLayout,
        *,
        num_rows: int | None = None,
        capacity_bytes: int | None = None,
        engine_id: str | None = None,
    ) -> "AnonymousRegion":
        """Make a region of so many rows, or of as many as fit. StartError if the memory is not there."""
        engine_id = engine_id or f"anonymous-{uuid.uuid4().hex[:12]}"
        where = f"region of engine {engine_id!r}"
        num_rows = _rows_in(
            where, num_rows * layout.row_stride if num_rows is not None else capacity_bytes or 0, layout
        )
        nbytes = num_rows * layout.row_stride
        _check_memory(where, nbytes)
        return cls(engine_id, layout, num_rows, map_memory(-1, nbytes, nbytes))


def _make_memory(where: str, engine_id: str, nbytes: int, huge_pages: HugePages) -> int:
    if huge_pages == "off":
        _check_memory(where, nbytes)
    return create_memfd(f"kvtiers-{plain_id(engine_id)}", nbytes, huge_pages)


def _start_prefault(
    memfd: int, map_bytes: int, page_bytes: int, numa_node: int | None, wanted: int, early: Prefault | None
) -> Prefault:
    if early is not None:
        return early
    if numa_node is not None:
        prefer_node(numa_node)  # the program inherits it; bind_to_node has reported already why it cannot be
    return Prefault(memfd, map_bytes, page_bytes, wanted)


def _rows_in(where: str, capacity_bytes: int, layout: CacheLayout) -> int:
    num_rows = capacity_bytes // layout.row_stride
    if num_rows < 1:
        raise StartError(
            f"{where}: primary.capacity {format_size(capacity_bytes)} holds no row; one row takes "
            f"{layout.row_stride} bytes ({layout.blocks_per_chunk} blocks of {layout.world_size} ranks)"
        )
    return num_rows


def _check_memory(where: str, nbytes: int) -> None:
    problem = memory_problem(nbytes)
    if problem:
        raise StartError(f"{where}: {problem}")
