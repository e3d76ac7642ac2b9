"""Stores in the background: a thread that packs values from what a cache had, and puts them.

``generate`` hands over tensors and returns. What waits is bounded in bytes: beyond it, the rest of a prompt is not
stored, and counted. A hole would make what comes behind it useless.
"""

import atexit
import logging
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvtiers import Client
from kvtiers.api.units import waitable
from kvtiers_transformers.geometry import ValueKind
from kvtiers_transformers.values import Frozen, new_values, pack, views_of

__all__ = ["Writer"]

_log = logging.getLogger("kvtiers")
_LAST_SECONDS = 10.0  # at the interpreter's exit


@dataclass(frozen=True)
class _Job:
    kind: ValueKind
    frozen: Frozen
    chunks: Sequence[int]
    keys: Sequence[bytes]
    chunk_tokens: int
    tenant: str
    computed: Any  # an event on the device's stream

    @property
    def nbytes(self) -> int:
        return len(self.chunks) * self.kind.nbytes


class Writer:
    """Puts values of one client. ``submit`` on the caller's thread never waits.

    ``group_bytes``: packed, and put, at a time; a part of the client's bounce rows, since the others are for loads.
    """

    def __init__(self, client: Client, pending_bytes: int, group_bytes: int) -> None:
        self._client = client
        self._group_bytes = group_bytes
        self._pending_bytes = pending_bytes
        self._lock = threading.Condition()
        self._waiting = 0
        self._streams: dict[torch.device, Any] = {}
        self._counts = {"stored_values": 0, "failed_values": 0, "dropped_values": 0}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvtiers-transformers-writer", daemon=True)
        self._thread.start()
        self._is_closed = False
        this = weakref.ref(self)
        self._at_exit = lambda: (it := this()) is not None and it.flush(_LAST_SECONDS)
        atexit.register(self._at_exit)

    def submit(
        self,
        kind: ValueKind,
        frozen: Frozen,
        chunks: Sequence[int],
        keys: Sequence[bytes],
        chunk_tokens: int,
        tenant: str = "",
    ) -> bool:
        """Store these chunks' values, of this tenant or no one's, when their turn comes; False if too much waits."""
        device = kind.parts[0].device
        computed = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        job = _Job(kind, frozen, chunks, keys, chunk_tokens, tenant, computed)
        with self._lock:
            if self._is_closed or (self._waiting and self._waiting + job.nbytes > self._pending_bytes):
                self._counts["dropped_values"] += len(chunks)
                return False
            self._waiting += job.nbytes
        self._jobs.put(job)
        return True

    def flush(self, timeout: float) -> bool:
        """Wait until everything that was submitted has been put, or has failed; False if it takes longer."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._waiting, waitable(timeout))

    def counts(self) -> dict[str, int]:
        """Return how many values were stored, were not, and were left out since too much waited."""
        with self._lock:
            return {**self._counts, "waiting_bytes": self._waiting}

    def close(self, timeout: float) -> None:
        """Flush, then end the thread."""
        until = time.monotonic() + waitable(timeout)
        self.flush(timeout)
        with self._lock:
            self._is_closed = True
        self._jobs.put(None)
        self._thread.join(max(0.1, until - time.monotonic()))
        atexit.unregister(self._at_exit)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            stored = 0
            try:
                with torch.inference_mode():
                    stored = self._put(job)
            except Exception:  # noqa: BLE001 -- the thread has other stores to do
                _log.exception("transformers: values could not be packed and are not stored")
            with self._lock:
                self._waiting -= job.nbytes
                self._counts["stored_values"] += stored
                self._counts["failed_values"] += len(job.chunks) - stored
                self._lock.notify_all()
            del job  # its tensors may be large

    def _put(self, job: _Job) -> int:
        device = job.kind.parts[0].device
        if job.computed is not None:
            job.computed.synchronize()  # before the time of a put begins
        stored = 0
        most = max(1, self._group_bytes // job.kind.nbytes)
        with torch.cuda.stream(self._stream(device)):  # the client waits for what is queued on it
            memory = new_values(min(most, len(job.chunks)), job.kind.nbytes, device)
            each = len(memory)
            for start in range(0, len(job.chunks), each):
                chunks = job.chunks[start : start + each]
                rows = memory[: len(chunks)]
                for row, chunk in zip(rows, chunks, strict=True):
                    pack(job.kind, job.frozen, chunk, job.chunk_tokens, row)
                result = self._client.put(job.keys[start : start + each], views_of(rows), tenant=job.tenant)
                stored += sum(result.stored)
                if result.error:
                    _log.warning(
                        "transformers: %d of %d values are not stored: %s",
                        len(chunks) - sum(result.stored),
                        len(chunks),
                        result.error,
                    )
        return stored

    def _stream(self, device: torch.device) -> Any:
        """Return this thread's stream on a GPU, one for all jobs: torch keeps the memory of each; None for the host."""
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]
