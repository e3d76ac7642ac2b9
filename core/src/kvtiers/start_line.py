"""The start line: one line of the log that describes the engine, once ranks have joined and tiers report their state.

A tier that cannot be used gets a line of its own then, though no request has come yet. A separate thread polls the
tiers' hosts for it: the engine's thread may be idle for hours, and polls nothing meanwhile.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from kvtiers import __version__
from kvtiers._failures import logged_boundary
from kvtiers.layout.cache_layout import CacheLayout

__all__ = ["OFF", "Announced", "StartFacts", "StartLine", "rows_in_words"]

OFF = "off"
"""The state of a tier that is off in this engine, for a reason that has been logged."""

_log = logging.getLogger("kvtiers")
_LOOK_SECONDS = 0.05
_LATER_LOOK_SECONDS = 0.5
_SAY_WITHIN = 10.0  # a tier that has said nothing by then is named as one that is still being opened
_CLOSE_SECONDS = 1.0


class Announced(Protocol):
    """The state of a tier while it is opened. Any thread; no method waits for a store."""

    def open_state(self) -> str | None:
        """Return "" if it is open, why it cannot be opened, or None before either; ``OFF``: it is never opened."""

    def warn_unusable(self, error: str) -> None:
        """Log that it is out of use and why, unless that has been logged already."""


@dataclass(frozen=True, slots=True)
class StartFacts:
    """The line's contents besides the tiers. ``way_in``: how kvtiers was started; ``shared``: others may use the KV.

    ``fingerprint``: empty where all tiers are off.
    """

    way_in: str
    primary: str
    namespace: str
    fingerprint: str
    shared: bool

    def line(self, tiers: Mapping[str, str], since: float | None) -> str:
        """Return the line. ``tiers``: each one's state, by name; ``since``: when the first was in use, in Unix time."""
        others = "by all engines with this namespace and fingerprint"
        if not (self.shared and tiers):
            whose = "shared with no other process"
        elif since is None:
            whose = f"to be shared {others} once a tier is in use"
        else:
            whose = f"shared since {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(since))} {others}"
        named = ", ".join(f"{name} {state}" for name, state in tiers.items()) or "none"
        if not self.fingerprint:
            return (
                f"kvtiers {__version__} is off, {self.way_in}; primary {self.primary}; tiers: {named}; "
                f"namespace {self.namespace!r}: nothing is stored or loaded"
            )
        return (
            f"kvtiers {__version__} is on, {self.way_in}; primary {self.primary}; tiers: {named}; "
            f"namespace {self.namespace!r}, fingerprint {self.fingerprint}: {whose}"
        )


def rows_in_words(layout: CacheLayout, checkpoints: str) -> str:
    """Return how many tokens a row has; of a hybrid model also its KV groups, and where its checkpoints are."""
    tokens = sorted({layout.tokens_per_chunk(group) for group in range(len(layout.groups))})
    kinds = Counter(
        {"full_attention": "full attention", "state_space": "states"}.get(each.kind, f"windows of {each.window} tokens")
        for each in layout.groups
    )
    rows = f"of {' or '.join(map(str, tokens))} tokens"
    groups = ", ".join(f"{count} with {kind}" for kind, count in kinds.items())
    if kinds.keys() == {"full attention"}:
        return f"{rows} (KV groups: {groups})" if len(layout.groups) > 1 else rows
    return f"{rows} (KV groups: {groups}; checkpoints: {checkpoints})"


class StartLine:
    """Writes the line when ``ready()`` and all tiers have reported their state, or 10 s after ``ready()``.

    ``start_wait``: in place of the 10 s, where the start itself waits longer for the tiers. ``tiers``: each by its
    name, with its type. ``close`` ends it, if it has not ended by itself.
    """

    def __init__(
        self,
        facts: StartFacts,
        tiers: Mapping[str, tuple[str, Announced]],
        ready: Callable[[], bool] = lambda: True,
        start_wait: float = 0.0,
    ) -> None:
        self._facts = facts
        self._tiers = tiers
        self._ready = ready
        self._say_within = max(_SAY_WITHIN, start_wait)
        self._states: dict[str, str | None] = dict.fromkeys(tiers)
        self._since: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtiers-start", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write nothing more."""
        self._closed.set()
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        # A line that is missing must not look like a tier that hangs.
        with logged_boundary(_log, "the start line cannot be written; a bug of kvtiers"):
            self._watch()

    def _watch(self) -> None:
        began, said = time.monotonic(), False
        ready_at: float | None = None
        while not self._closed.is_set():
            self._look(said=said)
            now = time.monotonic()
            if ready_at is None and self._ready():
                ready_at = now
            settled = None not in self._states.values()
            if not said and ready_at is not None and (settled or now - ready_at >= self._say_within):
                _log.info("%s", self._facts.line({name: self._words(name) for name in self._states}, self._since))
                said = True
            if said and settled:
                return
            self._closed.wait(_LOOK_SECONDS if now - began < self._say_within else _LATER_LOOK_SECONDS)

    def _look(self, *, said: bool) -> None:
        """Record the tiers' first reports."""
        for name, before in self._states.items():
            if before is not None:
                continue
            _, tier = self._tiers[name]
            state = self._states[name] = tier.open_state()
            if state and state != OFF:
                tier.warn_unusable(state)
            elif state is not None:
                self._since = self._since or time.time()
                if said:
                    _log.info("%s: in use", name)

    def _words(self, name: str) -> str:
        kind, _ = self._tiers[name]
        state = self._states[name]
        if state is None:
            return f"({kind}) still being opened"
        return f"({kind}) " + {"": "in use", OFF: OFF}.get(state, "not usable")
