"""A tier behind a lock for two threads: the engine's, and the one that receives requests while the engine steps.

vLLM looks a request up in the scheduling pass that could begin it. No tier answers within that pass, and a request
without an answer is deferred by a step: tens of milliseconds where others are being computed. But a server's engine
receives requests on a thread of its own, while a step runs. The probe is sent from there (``compat``), between two
calls of the engine's thread or not at all, so neither thread waits longer than a call takes.
"""

import threading
from collections.abc import Sequence
from typing import Any

from kvtiers.api import OffloadKey, TierRequest, TransferJob, make_offload_key
from kvtiers.secondary.store_tier import ChunkStoreTier
from kvtiers.secondary.tier_jobs import TierEvent
from kvtiers.tiering.tier_slot import TierSlot

__all__ = ["LockedTier", "prompt_keys"]


def prompt_keys(offloading: Any, request: Any) -> Sequence[OffloadKey]:
    """Return the keys by which vLLM's own manager looks a request up; none of a model with several KV groups.

    ``offloading``: vLLM's ``OffloadingConfig``, which does not say what a group has windows of, or states.
    """
    if len(offloading.groups) != 1:
        return ()
    (group,) = offloading.groups
    number = int(getattr(group, "group_id", 0))
    chunk_tokens = int(group.tokens_per_block) * int(offloading.cache.blocks_per_chunk)
    every = chunk_tokens // int(offloading.cache.tokens_per_hash)
    return [make_offload_key(bytes(end), number) for end in request.block_hashes[every - 1 :: every]]


class LockedTier:
    """Calls the tier in ``slot``, one call at a time. All but ``announce`` and ``tend`` is for the engine's thread."""

    def __init__(self, slot: TierSlot) -> None:
        self._slot = slot
        self._releasing = slot.tier if isinstance(slot.tier, ChunkStoreTier) else None
        """The tier, if its loads can release their rows before they end."""
        self._in_call = threading.Lock()

    def announce(self, keys: Sequence[OffloadKey]) -> None:
        """Probe for a prefix that will be looked up soon; not while the tier is in a call. Any thread."""
        if self._in_call.acquire(blocking=False):
            try:
                self._slot.announce(keys)
            finally:
                self._in_call.release()

    def tend(self, now: float) -> None:
        """Look after the tier while no step comes; not while it is in a call. Any thread."""
        if self._in_call.acquire(blocking=False):
            try:
                self._slot.tend(now)
            finally:
                self._in_call.release()

    def ask(self, key: OffloadKey, context: TierRequest) -> tuple[int, bool]:
        """Return 1 if the tier has this chunk, else 0, and whether the answer is still outstanding."""
        with self._in_call:
            return self._slot.ask([key], context)

    def submit(self, job: TransferJob) -> bool:
        """Submit a job; False: the tier did not accept it."""
        with self._in_call:
            return self._slot.submit(job)

    def poll(self) -> Sequence[TierEvent]:
        """Return the jobs' events since the last poll."""
        with self._in_call:
            return self._slot.poll()

    def release(self, job_id: int) -> None:
        """Make a load release its rows, if the tier's loads can."""
        if self._releasing is not None:
            with self._in_call:
                self._releasing.release_job(job_id)

    def abandon(self, job_id: int) -> None:
        """Inform the tier that one of its jobs was given up."""
        with self._in_call:
            self._slot.abandon(job_id)

    def drop(self, job_ids: Sequence[int]) -> None:
        """End jobs without their values that have not started."""
        if self._releasing is not None and job_ids:
            with self._in_call:
                self._releasing.drop_jobs(job_ids)

    def end_step(self) -> None:
        """Send what the step has collected."""
        with self._in_call:
            self._slot.end_step()

    def leave(self) -> None:
        """Put the tier out of use."""
        with self._in_call:
            self._slot.leave()

    def drain(self, timeout: float) -> None:
        """Drain the tier."""
        with self._in_call:
            self._slot.tier.drain(timeout)
