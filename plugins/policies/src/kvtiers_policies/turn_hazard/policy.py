"""Turn-hazard: evicts what is least likely to be used soon, by what the workload has taught so far.

An LRU takes the time since the last use for all that matters. In a chat it is not: a session whose user has just
answered twice within a minute comes back sooner than one that has been silent since its first turn, a system prompt
comes back always, and what a session has left behind on another way never does. The policy learns from each use and
each silence when runs of chunks come back (``hazard_model``), by what is known of a run: how deep and how long it is,
how often and how regularly it was used, how much the last turn added. It evicts the run with the least probability of
a use a second of held memory, tail first, and only leaves of the resident tree: no chunk stays that cannot be found.

What a request would store competes as well: ``worth_storing`` says how much of it is likelier to be used than what
would leave for it. Runs that a running request uses leave last, the one that began first before the others.

A client may say that a session ends (``hints``): what that session alone has used then leaves first. If it comes back
all the same, that is a miss of its own, and nothing is learnt from it. How soon a turn is expected and how long the
answer was are learnt from like everything else: they are worth what they turned out to be worth.

Everything is learnt again after a start or a reset: what one workload has taught misleads on another. Memory: some 120
bytes for each known chunk, of which 70 are its key, and 840 for each run (1,200 with long session ids); of the at most
16 known for each row. That is 2.6 KB a row with runs of 20 chunks, and at most 15 KB (21 KB), where each run is one.
"""

import heapq
from collections.abc import Collection, Iterator, Sequence
from itertools import filterfalse, islice

import numpy as np

from kvtiers.api import OffloadKey
from kvtiers.primary.eviction.base import EvictionPolicy
from kvtiers.types import RequestHints
from kvtiers_policies.turn_hazard.ages import Ages
from kvtiers_policies.turn_hazard.prefix_tree import PrefixTree, Run, Way
from kvtiers_policies.turn_hazard.reach import Reach, place_number

__all__ = ["TurnHazardPolicy"]

_KNOWN = 16  # known chunks, as a multiple of the capacity
_SMALL = 64
_LEARNT = 1000  # examples from which on what was learnt says more than the prior
_SHARED_USES = 3
_ASIDE = 64  # runs that stay, in one eviction, since they are to be looked at before


class TurnHazardPolicy(EvictionPolicy):
    """Learns when each run of chunks is used again, and evicts by that."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._tree = PrefixTree(self._used, self._idle, self._leaf, self._divided)
        self._ages = Ages(self._ranked)
        self._ways: dict[str, Way] = {}
        self._evictable = 0
        self._first: Collection[OffloadKey] = ()
        self._most_aside = 0
        self._loose: dict[Run, None] = {}  # runs with evictable chunks
        self._queue: list[tuple[float, float, int, int, int, Run]] = []
        self._queue_limit = _SMALL
        self._gone: list[tuple[float, int, int, Run]] = []  # without resident chunks and followers, unless used since
        self._gone_limit = _SMALL

    @property
    def known(self) -> int:
        """The number of known chunks, resident or not."""
        return len(self._tree.run_of)

    # -- uses

    def access(self, keys: Sequence[OffloadKey], request_id: str, new: Sequence[OffloadKey] = ()) -> None:
        """Follow the request's way through the tree."""
        if not keys:
            return
        way = self._way(request_id)
        self._tree.follow(way, keys)
        if new:
            self._tree.add(new)
        if not request_id:
            self._finish(way)
        self._forget()

    def request_finished(self, request_id: str) -> None:
        """Start the ages of the runs that the request used."""
        way = self._ways.pop(request_id, None)
        if way is not None:
            self._finish(way)
            self._forget()

    def worth_storing(self, keys: Sequence[OffloadKey], request_id: str) -> int:
        """Return how many of the leading keys are likelier to be used than what would leave for them."""
        resident = self._tree.resident
        absent = list(filterfalse(resident.__contains__, keys))
        if not absent:
            return len(keys)
        way = self._way(request_id)
        if way.reach > self.capacity:  # the rest of so long a prompt cannot be resident together with its head
            return keys.index(absent[0])
        self._tree.follow(way, keys)
        short = len(absent) - (self.capacity - len(resident))
        kept = len(absent) - (self._outranked(absent, short, way) if short > 0 else 0)
        if not request_id:
            self._finish(way)
        self._forget()
        return keys.index(absent[kept]) if kept < len(absent) else len(keys)

    def hint(self, request_id: str, hints: RequestHints) -> None:
        """Let what the request uses be ranked by what its client says."""
        self._way(request_id).hints = hints

    # -- residents

    def mark_evictable(self, keys: Sequence[OffloadKey]) -> None:
        """Let the chunks leave when their run's turn comes."""
        for run, part in self._tree.by_run(keys):
            run.allow(part)
            self._loose[run] = None
            if not run.queued:
                self._ages.rank_soon(run)
        self._evictable += len(keys)

    def mark_pinned(self, keys: Sequence[OffloadKey]) -> None:
        """Keep the chunks, whatever their run's rank."""
        for run, part in self._tree.by_run(keys):
            self._hold(run, part)
        self._evictable -= len(keys)

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Record that the chunks are not resident any more."""
        for run, part in self._tree.by_run(keys):
            evictable = [key for key in part if key in run.evictable]
            if evictable:
                self._hold(run, evictable)
                self._evictable -= len(evictable)
            self._drop(run, part)
        self._forget()

    def evict(self, count: int) -> list[OffloadKey] | None:
        """Take from the leaves that rank lowest, each from its tail; then from what requests use."""
        if count > self._evictable:
            return None
        victims = self._evict_ranked(count)
        self._evict_by_last_use(count, victims, None)
        return victims

    def evict_unused(self, count: int, request_id: str) -> list[OffloadKey]:
        """Do as ``evict``, but for the runs that this request uses."""
        victims = self._evict_ranked(min(count, self._evictable))
        if (way := self._ways.get(request_id)) is not None:
            self._evict_by_last_use(count, victims, way)
        return victims

    def coldest(self) -> Iterator[OffloadKey]:
        """Yield the evictable chunks: the queue's as they are ranked now, then the others by their last use."""
        for run in self._coldest_runs():
            yield from reversed(run.put_in_order())

    def leaving(self, count: int, seen: Collection[OffloadKey]) -> list[OffloadKey]:
        """Return the chunks of the runs that leave next, without those whose first and last chunk are in ``seen``."""
        found: list[OffloadKey] = []
        for run in self._coldest_runs():
            evictable = run.put_in_order()
            tail = islice(reversed(evictable), count)
            if next(reversed(evictable)) not in seen or next(iter(evictable)) not in seen:
                found += [key for key in tail if key not in seen]
            count -= len(evictable)
            if count <= 0:
                break
        return found

    def _coldest_runs(self) -> Iterator[Run]:
        self._ages.settle()  # what was just stored may be the coldest of all
        queue = self._queue
        seen: set[Run] = set()
        ahead = [(queue[0], 0)] if queue else []
        while ahead:  # the heap in its order, only as far as it is read
            entry, place = heapq.heappop(ahead)
            for child in range(2 * place + 1, min(2 * place + 3, len(queue))):
                heapq.heappush(ahead, (queue[child], child))
            run = entry[5]
            if run not in seen and self._valid(entry):
                seen.add(run)
                yield run
        for run in self._by_last_use():
            if run not in seen:
                yield run

    def forecasts_reuse(self) -> bool:
        """Learn from now on how far runs are used, too, for ``expected_reuse``."""
        if self._tree.reach is None:
            self._tree.reach = Reach()
        return True

    def evict_first(self, seen: Collection[OffloadKey] | None) -> None:
        """Put runs aside whose last chunk is not in ``seen``, a few at a time, for as long as there are others."""
        self._first, self._most_aside = ((), 0) if seen is None else (seen, _ASIDE)

    def expected_reuse(self, keys: Sequence[OffloadKey]) -> list[float]:
        """Return the probability of each of these chunks to be used again, at its run's age; 1 while little is learnt.

        Chunks of one run differ by their place: a use may end before.
        """
        odds = [1.0] * len(keys)
        reach = self._tree.reach
        self._ages.settle()
        if reach is None or self._ages.model.examples < _LEARNT:
            return odds
        found = list(map(self._tree.run_of.get, keys))
        runs = [run for run in dict.fromkeys(found) if run is not None and run.features and not run.users]
        if not runs:
            return odds
        uses = self._ages.model.next_uses([run.features for run in runs], [run.bin for run in runs])
        again = np.array([run.uses > 1 for run in runs])
        by_place = np.where(again[:, None], uses @ reach.shares(again=True), uses @ reach.shares(again=False))
        by_place[[run.ended for run in runs]] = 0.0
        of_run = dict(zip(runs, by_place.tolist(), strict=True))
        places: dict[Run, int] = {}
        for number, (key, run) in enumerate(zip(keys, found, strict=True)):
            if run in of_run:
                place = places.get(run, 0) - 1  # chunks leave from the tail on
                if place < 0 or run.keys[place] != key:
                    place = run.place(key)
                places[run] = place
                odds[number] = of_run[run][place_number(place)]
        return odds

    def shared_prefix(self, keys: Sequence[OffloadKey]) -> int:
        """Return how many of the leading keys requests that then went different ways have used a few times."""
        run = self._tree.run_of.get(keys[-1]) if keys else None
        while run is not None and (run.kids < 2 or run.uses < _SHARED_USES):
            run = run.parent
        return 0 if run is None else min(len(keys), run.depth + len(run.keys))

    def clear(self) -> None:
        """Forget all chunks, requests, and what was learnt."""
        if self._tree.reach is not None:
            self._tree.reach = Reach()
        self._tree.clear()
        self._ages.clear()
        self._ways.clear()
        self._evictable = 0
        self._loose.clear()
        self._queue.clear()
        self._gone.clear()
        self._gone_limit = _SMALL

    # -- inside: ways

    def _way(self, request_id: str) -> Way:
        way = self._ways.get(request_id)
        if way is None:
            now = self.clock()
            self._ages.passes(now)
            way = Way(now)
            if request_id:
                self._ways[request_id] = way
        return way

    def _finish(self, way: Way) -> None:
        now = self.clock()
        for run in way.runs:
            run.last = max(run.last, now)
            run.hints = way.hints
        self._tree.finish(way)

    def _used(self, run: Run, way: Way) -> None:
        self._ages.use(run, way.begin)
        if run.owner != way.hints.session:
            run.owner = None
        run.queued = False

    def _idle(self, run: Run) -> None:
        run.queued = False
        self._ages.restart(run)
        self._note_gone(run)

    def _leaf(self, run: Run) -> None:
        self._ages.rank_soon(run)
        self._note_gone(run)

    def _divided(self, head: Run, rest: Run) -> None:
        if head.evictable:
            self._loose[head] = None
        if not rest.evictable:
            self._loose.pop(rest, None)

    # -- inside: eviction

    def _ranked(self, run: Run) -> None:
        run.queued = True
        heapq.heappush(self._queue, (run.rank, run.last, -run.depth, run.serial, run.version, run))
        if len(self._queue) > self._queue_limit:
            self._queue = [entry for entry in self._queue if self._valid(entry)]
            heapq.heapify(self._queue)
            self._queue_limit = max(_SMALL, 2 * len(self._queue))

    @staticmethod
    def _valid(entry: tuple[float, float, int, int, int, Run]) -> bool:
        run = entry[5]
        return entry[4] == run.version and entry[0] == run.rank and run.may_leave

    def _lowest(self) -> Run | None:
        """Return the lowest ranking run that may leave; None: there is none."""
        while True:
            while self._queue:
                entry = self._queue[0]
                if self._valid(entry):
                    return entry[5]
                heapq.heappop(self._queue)
                if entry[4] == entry[5].version and entry[0] == entry[5].rank:
                    entry[5].queued = False
            if not self._ages.settle():
                return None

    def _evict_ranked(self, count: int) -> list[OffloadKey]:
        victims: list[OffloadKey] = []
        aside: list[tuple[float, float, int, int, int, Run]] = []
        while len(victims) < count and (run := self._lowest()) is not None:
            if len(aside) < self._most_aside and next(reversed(run.put_in_order())) not in self._first:
                aside.append(heapq.heappop(self._queue))
            else:
                self._take(run, count - len(victims), victims)
        for entry in aside:
            heapq.heappush(self._queue, entry)
        while len(victims) < count and (run := self._lowest()) is not None:
            self._take(run, count - len(victims), victims)
        return victims

    def _take(self, run: Run, count: int, victims: list[OffloadKey]) -> None:
        evictable = run.put_in_order()
        taken = [evictable.popitem()[0] for _ in range(min(count, len(evictable)))]
        victims += taken
        self._evictable -= len(taken)
        if not evictable:
            self._loose.pop(run, None)
        self._drop(run, taken)

    def _evict_by_last_use(self, count: int, victims: list[OffloadKey], spared: Way | None) -> None:
        for run in self._by_last_use() if len(victims) < count else ():
            if spared not in run.users:
                self._take(run, count - len(victims), victims)
            if len(victims) == count:
                break

    def _by_last_use(self) -> list[Run]:
        """Return the runs with evictable chunks, the least recently used first, what follows a run before that."""
        return sorted(self._loose, key=lambda run: (run.last, -run.depth, run.serial))

    def _outranked(self, keys: Sequence[OffloadKey], short: int, way: Way) -> int:
        """Return how many of a request's absent chunks, from the last on, rank below what would leave for them."""
        dropped = 0
        for run, part in reversed(list(self._tree.by_run(keys))):
            rank = 0.0 if run.ends_with(way.hints) else self._ages.rank_now(run)
            colder = self._colder_than(rank, short)
            if colder >= short:
                break
            dropped += min(len(part), short - colder)
            short -= min(len(part), short - colder)
        return dropped

    def _colder_than(self, rank: float, most: int) -> int:
        """Return how many chunks in the queue rank lower, counted up to ``most``."""
        found, aside = 0, []
        while found < most and (run := self._lowest()) is not None and run.rank < rank:
            found += len(run.evictable)
            aside.append(heapq.heappop(self._queue))
        for entry in aside:
            heapq.heappush(self._queue, entry)
        return found

    # -- inside: residents

    def _hold(self, run: Run, keys: Sequence[OffloadKey]) -> None:
        if len(keys) == len(run.evictable):
            run.evictable = {}
            self._loose.pop(run, None)
            return
        for key in keys:
            del run.evictable[key]

    def _drop(self, run: Run, keys: Sequence[OffloadKey]) -> None:
        self._tree.drop(run, keys)
        if not run.live:
            self._note_gone(run)

    def _note_gone(self, run: Run) -> None:
        if not run.live and not run.kids and not run.users:
            heapq.heappush(self._gone, (run.last, run.serial, run.version, run))
            if len(self._gone) > self._gone_limit:  # most are of runs that were used since
                latest = {entry[3]: entry for entry in self._gone if self._is_gone(entry)}
                self._gone = list(latest.values())
                heapq.heapify(self._gone)
                self._gone_limit = max(_SMALL, 2 * len(self._gone))

    @staticmethod
    def _is_gone(entry: tuple[float, int, int, Run]) -> bool:
        run = entry[3]
        return entry[2] == run.version and not (run.live or run.kids or run.users)

    def _forget(self) -> None:
        """Forget the least recently used of the chunks that are gone, once too many are known."""
        tree, most = self._tree, _KNOWN * self.capacity
        while len(tree.run_of) > most and self._gone:
            entry = heapq.heappop(self._gone)
            if not self._is_gone(entry):
                continue
            run = entry[3]
            tree.forget(run)
            if run.parent is not None:
                self._note_gone(run.parent)
        if len(tree.run_of) > most:
            tree.forget_all_gone()
            self._gone.clear()
