"""Pipelined loads: a request's chunks are copied to the GPU while a tier still reads later ones into the primary.

vLLM asks once how much of a prompt can be loaded, and allocates blocks for all of it. Here it is given a HIT for a
prefix of which a part is still on its way from a tier; the rows follow in parts, with the metadata of later steps:

::

    scheduler   lookup: HIT for a run that is partly pending    prepare_part: the leading rows that are ready
                each step: the next leading rows that are ready, as a plan of their own, until all have come
    worker      one job of vLLM's, a copy for each part; it ends with the copy of the last part
    at the end  chunks that did not come (the tier failed, or computing has become sooner) are reported as blocks
                that were not loaded, and vLLM computes from the first of them on

A prompt of 2 GiB waits for its read alone instead of the read and the copy. Blocks of the GPU are held meanwhile, so
few loads are pipelined at the same time, the oldest first; the others wait as before, and their copies overlap with
the reads of others. With several KV groups vLLM takes no report about single blocks, and a prompt with windows or
states is loaded whole or not at all: a load that lacks a chunk at its end has failed, and its request is computed. It
gets no hit of a shorter boundary: vLLM still counts the blocks of its whole prompt as reserved for it then, and admits
no load again, of this request or of those behind it, where these and the load's own do not fit side by side.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtiers.api import OffloadKey
from kvtiers.tiering.manager import TieringManager
from kvtiers.types import LoadPlan, Reach
from kvtiers_vllm.stack.requests import OpenRequest
from kvtiers_vllm.stack.worker import LoadPart, PlannedRows

__all__ = ["PipelinedLoads"]

_log = logging.getLogger("kvtiers.vllm")
_MOST = 2
"""Loads at the same time: the rows of the second come while the last ones of the first are copied."""

_WITHOUT_SOME = "are computed (vLLM: 'Recovered from KV load failure')"
_WITHOUT_ALL = "without them the others are no use: its prompt is computed"


@dataclass(slots=True, eq=False)
class _Run:
    """The chunks of a load in one KV group, of which the first ``done`` were sent."""

    keys: Sequence[OffloadKey]
    done: int = 0

    def left(self) -> Sequence[OffloadKey]:
        """Return those that were not sent."""
        return self.keys[self.done :]


@dataclass(slots=True, eq=False)
class _Load:
    """A load of a prompt's tokens from ``computed`` to ``end``. ``runs``: its chunks by KV group.

    ``asked``: from which token on it was last asked how much has come.
    """

    load_id: int
    request: OpenRequest
    computed: int
    end: int
    asked: int
    runs: list[_Run] = field(default_factory=list)

    def missing(self) -> int:
        """Return how many chunks were not sent."""
        return sum(len(run.keys) - run.done for run in self.runs)


class PipelinedLoads:
    """The pipelined loads of one engine; runs on its thread. ``start``: records a plan that goes to the workers.

    ``is_whole``: the model has several KV groups.
    """

    def __init__(
        self,
        manager: TieringManager,
        start: Callable[[LoadPlan, OpenRequest], PlannedRows],
        *,
        is_whole: bool,
    ) -> None:
        self._manager = manager
        self._start = start
        self._is_whole = is_whole
        self._ids = itertools.count(1)
        self._open: dict[OpenRequest, _Load] = {}
        self._parts: list[LoadPart] = []
        self.begun = 0
        """Loads so far."""

    def can_begin(self, reach: Reach) -> bool:
        """Return whether a load of which some is pending can begin now: its first chunk is readable."""
        return reach.begins and len(self._open) < _MOST

    def begin(
        self, request: OpenRequest, runs: Sequence[Sequence[OffloadKey]], computed: int, end: int
    ) -> PlannedRows | None:
        """Begin to load these chunks, by KV group, for these tokens of the prompt; None: it cannot be."""
        if len(self._open) >= _MOST:
            return None
        load = _Load(next(self._ids), request, computed, end, computed, list(map(_Run, runs)))
        rows = self._next_rows(load)
        if rows is not None:
            self._open[request] = load
            self.begun += 1
            rows.load_id = load.load_id
        return rows

    def advance(self) -> None:
        """Collect what has come since the last step; end the loads of which no more comes."""
        for load in list(self._open.values()):
            self._advance(load)

    def drop(self, request: OpenRequest) -> None:
        """End the load of a request that has ended: no more rows are copied for it."""
        load = self._open.pop(request, None)
        if load is not None:
            self._parts.append(LoadPart(load.load_id, None, is_last=True))

    def take_parts(self) -> list[LoadPart]:
        """Return the parts that are to go to the workers with this step."""
        parts, self._parts = self._parts, []
        return parts

    def are_open(self) -> bool:
        """Return whether steps are needed: more is to come, or to be sent."""
        return bool(self._open or self._parts)

    def _advance(self, load: _Load) -> None:
        request = load.request
        more, rows = False, None
        if request.keys is not None and not request.load_failed:
            begin = self._begin_of(load)
            with self._manager.lock:
                waits = self._manager.waits_on(request.context, load.asked, load.end)
                reach = waits or self._manager.reach(request.keys.groups(), request.context, begin, load.end)
            if waits:
                rows, more = self._next_rows(load), True
            elif not self._is_whole:
                load.asked = begin
                rows = self._next_rows(load) if reach.ready else None
                more = reach.unresolved or begin + reach.tokens > self._begin_of(load)
            elif reach.unresolved or begin + reach.tokens >= load.end:
                rows, more = self._next_rows(load), reach.waits
        is_last = not more or not load.missing()
        if rows is not None or is_last:
            self._parts.append(LoadPart(load.load_id, rows, is_last=is_last))
        if is_last:
            del self._open[request]
            if missing := load.missing():
                request.load_failed = True
                self._note_late(load, missing)

    def _begin_of(self, load: _Load) -> int:
        """Return the first token of the chunks that were not sent; of the whole load, if a part of it is no use."""
        if self._is_whole:
            return load.computed
        tokens = self._manager.tokens_per_chunk[0]
        return (load.computed // tokens + load.runs[0].done) * tokens

    def _note_late(self, load: _Load, missing: int) -> None:
        with self._manager.lock:
            self._manager.load_was_late()
        _log.info(
            "request %s: %d of %d chunks from tiers came too late or not at all, and %s",
            load.request.context.request_id,
            missing,
            sum(len(run.keys) for run in load.runs),
            _WITHOUT_ALL if self._is_whole else _WITHOUT_SOME,
        )

    def _next_rows(self, load: _Load) -> PlannedRows | None:
        """Pin the leading rows of each group that are ready; None: there are none."""
        context = load.request.context
        with self._manager.lock:
            part = self._manager.prepare_part([run.left() for run in load.runs], context)
        if part is None:
            return None
        plan, ready = part
        for run, chunks in zip(load.runs, ready, strict=True):
            run.done += chunks
        rows = self._start(plan, load.request)
        rows.by_group = tuple(ready)
        return rows
