"""The request notifier: orders the start and end notifications of requests around a rung-3 tier's queued stores.

::

    on_new_request, as soon as the tier is open -> its jobs -> on_request_finished, after its last store

A store waits for its seal; the end of its request waits with it.
"""

from collections.abc import Callable

from kvtiers._failures import log_with_backoff, plugin_boundary
from kvtiers.api import SecondaryTierManager, TierRequest
from kvtiers.types import RequestContext

__all__ = ["RequestNotifier"]

_NO_REQUEST = RequestContext("")


class RequestNotifier:
    """The open requests of one tier, and those that are over but have stores that the tier was not handed yet.

    A tier is None as long as it is not open; then it is not notified. ``log``: takes a line about a failed call whose
    result is not used.
    """

    def __init__(self, log: Callable[..., None]) -> None:
        self._log = log
        self._open: dict[TierRequest, None] = {}
        self._over: dict[TierRequest, None] = {}
        self._stores: dict[TierRequest, int] = {}
        """Stores that the tier was not handed yet."""
        self._failed = 0

    def notify_all(self, tier: SecondaryTierManager) -> None:
        """Notify a tier that has just opened of the requests that it missed; its answers are not used."""
        for context in [*self._over, *self._open]:
            self._call("on_new_request", tier.on_new_request, context)

    def begin(self, context: TierRequest, tier: SecondaryTierManager | None) -> bool:
        """Record a new request; return True if the tier wants all its chunks."""
        before = next((over for over in self._over if over.request_id == context.request_id), None)
        if before is not None:  # the id is used again: the stores that still wait have no request now
            del self._stores[before]
            self._end(before, tier)
        self._open[context] = None
        return tier is not None and tier.on_new_request(context)

    def finish(self, context: TierRequest, tier: SecondaryTierManager | None) -> None:
        """Record a request's end; notify the tier at once, or after the last store that waits."""
        if context not in self._open:
            return
        del self._open[context]
        if context in self._stores:
            self._over[context] = None
        elif tier is not None:
            tier.on_request_finished(context)

    def store_waits(self, context: TierRequest) -> None:
        """Record a store that the tier will be handed later."""
        self._stores[context] = self._stores.get(context, 0) + 1

    def owner(self, context: TierRequest) -> TierRequest:
        """Return the request for which a store that has waited is handed over."""
        return context if context in self._stores else _NO_REQUEST

    def store_is_over(self, context: TierRequest, tier: SecondaryTierManager) -> None:
        """Record that a queued store was handed over or dropped; after its request's last one, end the request."""
        left = self._stores.pop(context, 1) - 1
        if left:
            self._stores[context] = left
        elif context in self._over:
            self._end(context, tier)

    def _end(self, context: TierRequest, tier: SecondaryTierManager | None) -> None:
        del self._over[context]
        if tier is not None:
            self._call("on_request_finished", tier.on_request_finished, context)

    def _call(self, name: str, call: Callable[[TierRequest], object], context: TierRequest) -> None:
        with plugin_boundary() as boundary:
            call(context)
        if boundary.error:
            self._failed = times = self._failed + 1
            message = "its %s() failed (%d times so far): %s"
            log_with_backoff(times, self._log, message, name, times, boundary.error)
