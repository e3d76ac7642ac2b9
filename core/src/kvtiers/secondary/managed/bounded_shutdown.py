"""The shutdown proxy: the calls by which a tier of the third rung is drained, all on one thread and within one time.

A tier is third-party code, and may never return: that must not keep an engine from ending.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

from kvtiers._failures import error_text
from kvtiers.api import JobResult, SecondaryTierManager, TierRequest, TransferJob

__all__ = ["ShutdownProxy"]

_T = TypeVar("_T")


class ShutdownProxy(SecondaryTierManager):
    """Passes on to ``tier`` what a drain asks of it, for so many seconds in all, and raises what it raises.

    A call that does not return in time, and every one after it, answers nothing: no result, not drained. The tier is
    then asked nothing more, also when that call returns in the end.
    """

    def __init__(self, tier: SecondaryTierManager, seconds: float, label: str) -> None:
        self.hangs_in = ""
        """The method that did not return."""
        self._tier = tier
        self._until = time.monotonic() + seconds
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # No executor: the interpreter waits for its threads at the end, and so for a call that hangs.
        self._thread = threading.Thread(target=self._run, name=f"kvtiers-{label}-drain", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the thread; that of a tier that hangs ends when its call returns."""
        self._calls.put(None)
        if not self.hangs_in:
            self._thread.join()

    def on_new_request(self, context: TierRequest) -> bool:
        """Make this call of the tier's, on the drain's thread."""
        return self._call(lambda: self._tier.on_new_request(context), "on_new_request", otherwise=False)

    def on_request_finished(self, context: TierRequest) -> None:
        """Make this call of the tier's, on the drain's thread."""
        self._call(lambda: self._tier.on_request_finished(context), "on_request_finished", otherwise=None)

    def submit_store(self, job: TransferJob) -> None:
        """Make this call of the tier's, on the drain's thread."""
        self._call(lambda: self._tier.submit_store(job), "submit_store", otherwise=None)

    def submit_load(self, job: TransferJob) -> None:
        """Make this call of the tier's, on the drain's thread."""
        self._call(lambda: self._tier.submit_load(job), "submit_load", otherwise=None)

    def get_finished_jobs(self) -> Sequence[JobResult]:
        """Make this call of the tier's, on the drain's thread."""
        nothing: list[JobResult] = []
        return self._call(lambda: list(self._tier.get_finished_jobs()), "get_finished_jobs", otherwise=nothing)

    def drain(self, timeout: float) -> bool:
        """Make this call of the tier's, on the drain's thread."""
        return self._call(lambda: self._tier.drain(timeout), "drain", otherwise=False)

    def _call(self, call: Callable[[], _T], name: str, *, otherwise: _T) -> _T:
        if self.hangs_in:
            return otherwise
        outcome: Future[_T] = Future()

        def answer() -> None:
            try:
                outcome.set_result(call())
            except Exception as error:  # noqa: BLE001 -- for the caller
                outcome.set_exception(error)
            except BaseException as error:  # noqa: BLE001 -- meant to end this thread, not the caller's
                outcome.set_exception(RuntimeError(error_text(error)))

        self._calls.put(answer)
        if outcome in wait([outcome], max(0.0, self._until - time.monotonic())).not_done:
            self.hangs_in = name
            return otherwise
        return outcome.result()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
