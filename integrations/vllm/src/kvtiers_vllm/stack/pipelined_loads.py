"""Pipelined loads: a request's chunks are copied to the GPU while a tier still reads later ones into the primary.

vLLM asks once how much of a prompt can be loaded, and allocates blocks for all of it. Here it is given a HIT for a
prefix of which a part is still on its way from a tier; the rows follow in parts, with the metadata of later steps:

::

    scheduler   lookup: HIT for a run that is partly pending    prepare_load: the leading rows that are ready
                each step: the next leading rows that are ready, as a plan of their own, until all have come
    worker      one job of vLLM's, a copy for each part; it ends with the copy of the last part
    at the end  chunks that did not come (the tier failed, or computing has become sooner) are reported as blocks
                that were not loaded, and vLLM computes from the first of them on

A prompt of 2 GiB waits for its read alone instead of the read and the copy. Blocks of the GPU are held meanwhile, so
few loads are pipelined at the same time, the oldest first; the others wait as before, and their copies overlap with
the reads of others. Only with one KV group: else vLLM takes no report about single blocks.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvtiers.api import OffloadKey
from kvtiers.tiering.manager import TieringManager
from kvtiers.types import LoadPlan
from kvtiers_vllm.stack.requests import OpenRequest
from kvtiers_vllm.stack.worker import NO_PLAN, LoadPart, PlannedRows

__all__ = ["PipelinedLoads"]

_log = logging.getLogger("kvtiers.vllm")
_MOST = 2
"""Loads at the same time: the rows of the second come while the last ones of the first are copied."""


@dataclass(slots=True, eq=False)
class _Load:
    """A load of which the first ``done`` chunks were sent. ``first``: the number of its first chunk in the prompt."""

    load_id: int
    request: OpenRequest
    keys: Sequence[OffloadKey]
    first: int
    done: int


class PipelinedLoads:
    """The pipelined loads of one engine; runs on its thread. ``start``: records a plan that goes to the workers."""

    def __init__(
        self,
        manager: TieringManager,
        start: Callable[[LoadPlan, OpenRequest], PlannedRows],
        *,
        is_possible: bool,
        most: int = _MOST,
    ) -> None:
        self._manager = manager
        self._start = start
        self._most = most if is_possible else 0
        self._ids = itertools.count(1)
        self._open: dict[OpenRequest, _Load] = {}
        self._parts: list[LoadPart] = []
        self.begun = 0
        """Loads so far."""

    def can_begin(self, run: Sequence[OffloadKey]) -> bool:
        """Return whether a run that is partly pending can be loaded from now on: its first chunks are readable."""
        if len(self._open) >= self._most:
            return False
        with self._manager.lock:
            return self._manager.ready_run(run[:1]) > 0

    def begin(self, request: OpenRequest, keys: Sequence[OffloadKey], first: int) -> PlannedRows | None:
        """Begin to load these chunks, the first of which is the prompt's chunk number ``first``; None: it cannot be."""
        if not self.can_begin(keys):
            return None
        load = _Load(next(self._ids), request, keys, first, 0)
        self._open[request] = load
        self.begun += 1
        rows = self._next_rows(load) or PlannedRows(NO_PLAN, request.context.request_id, np.empty(0, np.int32))
        rows.load_id, rows.chunks = load.load_id, len(keys)
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
            tokens = self._manager.tokens_per_chunk[0]
            begin, end = ((load.first + chunks) * tokens for chunks in (load.done, len(load.keys)))
            with self._manager.lock:
                reach = self._manager.reach(request.keys.groups(), request.context, begin, end)
            rows = self._next_rows(load) if reach.ready else None
            more = reach.unresolved or begin + reach.tokens > (load.first + load.done) * tokens
        is_last = load.done == len(load.keys) or not more
        if rows is not None or is_last:
            self._parts.append(LoadPart(load.load_id, rows, is_last=is_last))
        if is_last:
            del self._open[request]
            if missing := len(load.keys) - load.done:
                request.load_failed = True
                self._note_late(load, missing)

    def _note_late(self, load: _Load, missing: int) -> None:
        with self._manager.lock:
            self._manager.load_was_late()
        _log.info(
            "request %s: %d of %d chunks from tiers came too late or not at all, and are computed "
            "(vLLM: 'Recovered from KV load failure')",
            load.request.context.request_id,
            missing,
            len(load.keys),
        )

    def _next_rows(self, load: _Load) -> PlannedRows | None:
        """Pin the leading rows that are ready; None: there are none."""
        rest, context = load.keys[load.done :], load.request.context
        with self._manager.lock:
            ready = self._manager.ready_run(rest)
            plan = self._manager.prepare_load(rest[:ready], context) if ready else None
        if plan is None:
            return None
        load.done += ready
        return self._start(plan, load.request)
