"""The prefix tree: which chunks every request so far has used together, which follow which, and which are resident.

A *run* is a sequence of chunks that no request has used in part: a shared system prompt, the turns of one session,
what was left over when a session took another way. A request's way goes from a run to one that follows it. Where a way
ends or leaves inside of a run, the run is split: the rest is a run of its own, which was not used. A way is complete
only when its request is finished, so a run is split no sooner, unless the request goes on with other chunks.

Chunks that are not resident stay *known*, so that their next use can be learnt from, until they are too many.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from kvtiers.api import OffloadKey
from kvtiers.types import NO_HINTS, RequestHints
from kvtiers_policies.turn_hazard.reach import Reach

__all__ = ["PrefixTree", "Run", "Way"]


class _Uses(NamedTuple):
    """What is known of a run's uses, for the part of it that a request turns out not to have used."""

    last: float
    first: float
    gap: float
    uses: int
    grown: int
    left_over: int
    bin: int
    hints: RequestHints


class Run:
    """Chunks that are used together.

    ``depth``: chunks before it. ``kids``: runs that follow it; ``live_kids``: those with a resident chunk, or with one
    further down. ``evictable``: chunks, head first while ``in_order``. ``last``, ``first``: times of uses; ``gap``:
    seconds between the last two. ``grown``: chunks that the last use has added. ``left_over``: 0, or how much of the
    run that it was part of went another way, 1 to 3. ``bin``, ``features``: for the model, since the last use.
    ``hints``: of the last request that used it; ``owner``: the one session that has used it.
    ``version`` counts on when queued entries of the run are no longer true.
    """

    __slots__ = (
        "bin", "depth", "evictable", "features", "first", "gap", "grown", "hints", "in_order", "keys", "kids", "last",
        "left_over", "live_kids", "owner", "parent", "queued", "rank", "resident", "serial", "users", "uses", "version",
    )  # fmt: skip

    def __init__(self, serial: int, keys: list[OffloadKey], parent: "Run | None", now: float) -> None:
        self.serial = serial
        self.keys = keys
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + len(parent.keys)
        self.kids = self.live_kids = self.resident = 0
        self.evictable: dict[OffloadKey, None] = {}
        self.in_order = True
        self.users: set[Way] = set()
        self.last = self.first = now
        self.gap = 0.0
        self.uses = 1
        self.grown = len(keys)
        self.left_over = self.bin = self.version = 0
        self.features = b""
        self.hints = NO_HINTS
        self.owner: str | None = None
        self.rank = 0.0
        self.queued = False

    def ends_with(self, hints: RequestHints) -> bool:
        """Return whether a request with these hints was its last use: its session ends, and no other has used it."""
        if not hints.session_ends or self.kids:
            return False
        return self.owner == hints.session if hints.session else self.uses == 1

    @property
    def ended(self) -> bool:
        """Return whether the session that it belongs to has ended."""
        return self.ends_with(self.hints)

    @property
    def live(self) -> bool:
        """Return whether it or a run that follows it has a resident chunk."""
        return self.resident > 0 or self.live_kids > 0

    @property
    def may_leave(self) -> bool:
        """Return whether it has evictable chunks, and neither a request that uses it nor anything resident below."""
        return bool(self.evictable) and not self.users and not self.live_kids

    def place(self, key: OffloadKey) -> int:
        """Return the place of a chunk in the run."""
        return len(self.keys) - 1 if self.keys[-1] == key else self.keys.index(key)

    def covers(self, keys: Sequence[OffloadKey]) -> bool:
        """Return whether these chunks are the first or last ones of the run, which takes no look-up for each."""
        return self.keys[: len(keys)] == keys or self.keys[-len(keys) :] == keys

    def allow(self, keys: Sequence[OffloadKey]) -> None:
        """Make these resident chunks evictable."""
        if self.evictable:
            self.in_order = self.in_order and len(keys) == 1 and self.keys[-1] == keys[0]
            self.evictable.update(dict.fromkeys(keys))
        else:
            self.in_order = self.covers(keys)
            self.evictable = dict.fromkeys(keys)

    def put_in_order(self) -> dict[OffloadKey, None]:
        """Return the evictable chunks, head first."""
        if not self.in_order:
            evictable = self.evictable
            self.evictable = dict.fromkeys([key for key in self.keys if key in evictable])
            self.in_order = True
        return self.evictable

    def uses_so_far(self) -> _Uses:
        """Return what is known of its uses."""
        return _Uses(self.last, self.first, self.gap, self.uses, self.grown, self.left_over, self.bin, self.hints)

    def set_uses(self, uses: _Uses) -> None:
        """Go back to what was known."""
        self.last, self.first, self.gap, self.uses, self.grown, self.left_over, self.bin, self.hints = uses


class Way:
    """The way of one running request: the runs that it uses, with what was known of each before, and its last chunk."""

    __slots__ = ("begin", "end", "hints", "left", "reach", "runs")

    def __init__(self, begin: float) -> None:
        self.begin = begin
        self.left: set[Run] = set()
        """The runs that were split where it left them."""
        self.runs: dict[Run, _Uses | None] = {}
        self.end: OffloadKey | None = None
        self.reach = 0
        self.hints = NO_HINTS


class PrefixTree:
    """All known runs. ``used(run, way)`` is called at a request's first use of one, ``idle(run)`` after the last user.

    ``leaf(run)``: no resident chunk follows the run any more. ``divided(head, rest)``: a run with evictable chunks is
    two now.
    """

    def __init__(
        self,
        used: Callable[[Run, Way], None],
        idle: Callable[[Run], None],
        leaf: Callable[[Run], None],
        divided: Callable[[Run, Run], None],
    ) -> None:
        self.reach: Reach | None = None
        """Learns how far runs are used, once there is one."""
        self.run_of: dict[OffloadKey, Run] = {}
        self.resident: set[OffloadKey] = set()
        self.runs = 0
        self._serial = 0
        self._used, self._idle, self._leaf, self._divided = used, idle, leaf, divided

    def by_run(self, keys: Sequence[OffloadKey]) -> Iterator[tuple[Run, Sequence[OffloadKey]]]:
        """Yield each run of these known chunks with its part of them."""
        at = 0
        while at < len(keys):
            run = self.run_of[keys[at]]
            part = keys[at : at + len(run.keys)]
            if not run.covers(part):
                break
            yield run, part
            at += len(part)
        for run, same in groupby(list(map(self.run_of.__getitem__, keys[at:]))):
            end = at + len(list(same))
            yield run, keys[at:end]
            at = end

    # -- ways

    def follow(self, way: Way, keys: Sequence[OffloadKey]) -> None:
        """Record that a request uses one chunk or more of a prefix; unknown ones follow what it has used so far."""
        first = self.run_of.get(keys[0])
        if first is not None and first.covers(keys):
            self._reach(way, keys[-1])
            return
        if first is None and self.run_of.keys().isdisjoint(keys):
            self._extend(way, list(keys))
            return
        at = 0
        for run, same in groupby(list(map(self.run_of.get, keys))):
            end = at + len(list(same))
            if run is None:
                self._extend(way, list(keys[at:end]))
            else:
                if at and run.parent is None:
                    self._link(keys[at - 1], run, way)
                self._reach(way, keys[end - 1])
            at = end

    def finish(self, way: Way) -> None:
        """End a request's way: split the run in which it ends."""
        run = None if way.end is None else self.run_of.get(way.end)
        if run is not None and way.end is not None and (place := run.place(way.end) + 1) < len(run.keys):
            self._split(run, place, way)
        if self.reach is not None:
            for each, before in way.runs.items():
                if before is not None and each not in way.left:
                    self._note_reach(self.reach, way, before, len(each.keys), len(each.keys))
        for each in way.runs:
            each.users.discard(way)
            if not each.users:
                self._idle(each)

    @staticmethod
    def _note_reach(reach: Reach, way: Way, before: _Uses, used: int, length: int) -> None:
        reach.note(max(0.0, way.begin - before.last), used, length, again=before.uses > 1)

    def _reach(self, way: Way, key: OffloadKey) -> None:
        run = self.run_of[key]
        above: Run | None = run
        while above is not None and above not in way.runs:  # what follows a chunk is used with it
            way.runs[above] = above.uses_so_far()
            above.users.add(way)
            self._used(above, way)
            above = above.parent
        if run.depth + len(run.keys) > way.reach and (reach := run.depth + run.place(key) + 1) > way.reach:
            way.reach, way.end = reach, key

    def _link(self, before: OffloadKey, run: Run, way: Way) -> None:
        """Let a run that followed none follow this chunk: its head was not named when it became known."""
        above = top = self.run_of[before]
        while top.parent is not None:
            top = top.parent
        if top is run:
            return
        if (place := above.place(before) + 1) < len(above.keys):
            above = self._split(above, place, way)
        run.parent, run.depth = above, above.depth + len(above.keys)
        above.kids += 1
        if run.live:
            self._revive(run)
        way.reach, way.end = 0, None  # places count from the head now
        self._reach(way, before)

    def _extend(self, way: Way, keys: list[OffloadKey]) -> None:
        run = None if way.end is None else self.run_of.get(way.end)
        if run is not None and way.end is not None and (place := run.place(way.end) + 1) < len(run.keys):
            run = self._split(run, place, way)
        if run is not None and not run.kids:  # the same session goes on
            run.keys += keys
            run.grown += len(keys)
        else:
            self._serial += 1
            self.runs += 1
            before, run = run, Run(self._serial, keys, run, way.begin)
            if before is not None:
                before.kids += 1
            way.runs[run] = None
            run.users.add(way)
            run.owner = way.hints.session or None
        for key in keys:
            self.run_of[key] = run
        way.reach, way.end = run.depth + len(run.keys), keys[-1]

    def _split(self, run: Run, place: int, way: Way) -> Run:
        """Make a run of the first ``place`` chunks, which the request uses; it does not use the rest."""
        self._serial += 1
        self.runs += 1
        share = place / len(run.keys)
        head = Run(self._serial, run.keys[:place], None, 0.0)
        head.parent, head.depth, head.kids = run.parent, run.depth, 1
        head.set_uses(run.uses_so_far())
        head.features, head.owner = run.features, run.owner
        run.keys, run.parent, run.depth = run.keys[place:], head, run.depth + place
        self.run_of.update(dict.fromkeys(head.keys, head))
        head.resident = sum(map(self.resident.__contains__, head.keys))
        run.resident -= head.resident
        head.live_kids = int(run.live)
        if run.evictable:
            head.evictable = {key: None for key in run.evictable if self.run_of[key] is head}
            head.in_order = run.in_order
            for key in head.evictable:
                del run.evictable[key]
            self._divided(head, run)
        for user in run.users:
            user.runs[head] = user.runs[run]
        head.users = set(run.users)
        before = way.runs.pop(run, None)
        if self.reach is not None and before is not None:
            self._note_reach(self.reach, way, before, place, place + len(run.keys))
            way.left.add(head)
        run.users.discard(way)
        if not run.users:
            if before is not None:
                run.set_uses(before)
            # Most of a run that went another way is nearly always over: it says more than the rest's own size.
            part = (share > 0.1) + (share >= 0.5) + (share > 0.9)
            run.left_over = part if part > 1 else max(run.left_over, part)
            self._idle(run)
        return head

    # -- residents

    def add(self, keys: Sequence[OffloadKey]) -> None:
        """Record that these known chunks are resident now."""
        for run, part in self.by_run(keys):
            was_live = run.live
            run.resident += len(part)
            if not was_live:
                self._revive(run)
        self.resident.update(keys)

    def drop(self, run: Run, keys: Sequence[OffloadKey]) -> None:
        """Record that these chunks of one run are no longer resident."""
        run.resident -= len(keys)
        self.resident.difference_update(keys)
        while not run.live and (above := run.parent) is not None:
            above.live_kids -= 1
            if above.live_kids:
                break
            self._leaf(above)
            run = above

    @staticmethod
    def _revive(run: Run) -> None:
        while (above := run.parent) is not None:
            above.live_kids += 1
            if above.live_kids > 1 or above.resident:
                break
            run = above

    # -- forgetting

    def forget(self, run: Run) -> None:
        """Forget a run without resident chunks that no run follows and no request uses."""
        list(map(self.run_of.pop, run.keys))
        run.version += 1
        self.runs -= 1
        if run.parent is not None:
            run.parent.kids -= 1

    def forget_all_gone(self) -> None:
        """Forget every chunk that is not resident. Runs without any are taken out from between the others."""
        runs = dict.fromkeys(self.run_of.values())
        for run in runs:
            run.keys = [key for key in run.keys if key in self.resident]
            run.kids = run.live_kids = 0
        for run in runs:
            if not run.keys:
                run.version += 1
                for way in run.users:
                    way.runs.pop(run, None)
                continue
            while run.parent is not None and not run.parent.keys:
                run.parent = run.parent.parent
            if run.parent is not None:
                run.parent.kids += 1
                run.parent.live_kids += 1
        self.run_of = {key: run for run in runs for key in run.keys}
        self.runs = sum(1 for run in runs if run.keys)

    def clear(self) -> None:
        """Forget everything."""
        self.run_of.clear()
        self.resident.clear()
        self.runs = 0
