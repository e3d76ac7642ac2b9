"""The digests of adapters' files, made in a thread of its own, so that the engine's never waits for a file system.

::

    request arrives      its adapter's digest is asked for; until it is there the request has no keys
    vLLM may begin it    files examined only now may not be those that vLLM loads: they count if they are old
    loaded at a call     (``add_lora``) the same; the call waits a moment for the files to be examined
    store has ended      the files are examined again: unchanged, or the store fails
    adapter reloaded     from that request's arrival until its digest is there no request with the adapter has keys

A request without keys finds and stores nothing. Digests are made in the order in which they were asked for. The
engine's thread reads one at its next call; neither thread waits for the other. One case is not covered: files that are
replaced between a request's digest and vLLM's first loading of them, while the request is queued; it may then find KV
that the earlier files stored.
"""

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from kvtiers._failures import logged_boundary
from kvtiers_vllm.never_raise import BugCount, never_raises
from kvtiers_vllm.stack.adapters import Adapters, Files

__all__ = ["AdapterDigests", "Confirmation", "DigestRequest", "Question", "Standing"]

_log = logging.getLogger("kvtiers.vllm")
_MOST_WAITING = 10_000  # questions about a file system that hangs
_OLD_NS = 2_000_000_000  # by which clocks of file systems may differ from this machine's
_LOAD_SECONDS = 0.05  # that loading an adapter waits until the files that it reads next have been examined


class Standing(Enum):
    """The state of a request's adapter."""

    UNKNOWN = "not known yet"
    KNOWN = "known, and vLLM's is the same"
    CHANGED = "uncertain, or another one than when the request came"


class Question(Protocol):
    """A question for the thread that reads adapters' files."""

    def answer(self, adapters: Adapters) -> None:
        """Find the answer; on that thread."""


@dataclass(slots=True, eq=False)
class Confirmation:
    """The question whether an adapter's files are unchanged."""

    lora: Any
    answered: bool = False
    unchanged: bool = False

    def answer(self, adapters: Adapters) -> None:
        """Examine the files; on the adapters' thread."""
        self.unchanged = adapters.is_unchanged(self.lora)
        self.answered = True


class DigestRequest:
    """A request for an adapter's digest. ``lora``: vLLM's request for it. ``arrived``: when, in ns of the epoch."""

    def __init__(self, digests: "AdapterDigests", lora: Any, arrived: int) -> None:
        self.number: int = lora.lora_int_id
        self.digest = b""
        self.examined = threading.Event()
        """Set when the files have been examined, or cannot be; digesting them takes longer."""
        self._digests = digests
        self._lora = lora
        self._arrived = arrived
        self._late = False
        self._changes = 0
        self._answered = False
        self._found: Files | OSError | None = None

    @property
    def standing(self) -> Standing:
        """The request's current standing; CHANGED is permanent."""
        if not self._answered:
            return Standing.UNKNOWN
        if not self.digest or self._changes != self._digests.changes(self.number):
            return Standing.CHANGED
        return Standing.UNKNOWN if self._digests.is_reloading(self.number) else Standing.KNOWN

    @property
    def was_another(self) -> bool:
        """Return whether this engine had another adapter under this number before."""
        return self._digests.changes(self.number) > 0

    def vllm_may_load(self) -> None:
        """Record that vLLM may load the files from now on."""
        self._late |= not self.examined.is_set()

    def confirm(self) -> Confirmation:
        """Start to check whether the files are still the same."""
        confirmation = Confirmation(self._lora)
        self._digests.ask(confirmation)
        return confirmation

    def examine(self) -> Files | OSError:
        """Examine the files, unless that has been done; not on the engine's thread."""
        found = self._found
        if found is None:
            try:
                found = Files.of(self._lora)
            except OSError as error:
                found = error
            self._found = found
            self.examined.set()
        return found

    def answer(self, adapters: Adapters) -> None:
        """Examine the files, and digest what is new; on the adapters' thread."""
        found = self.examine()
        if isinstance(found, OSError):
            adapters.lose(self._lora, f"{type(found).__name__}: {found}")
        else:
            as_loaded = not self._late or found.changed < self._arrived - _OLD_NS
            self.digest = adapters.digest(self._lora, found, as_loaded=as_loaded) or b""
        self._changes = adapters.changes[self.number]
        self._answered = True
        if self._lora.load_inplace:
            self._digests.reloaded[self.number] += 1


class AdapterDigests:
    """The digests of an engine's adapters. Everything but ``answer`` runs on the engine's thread."""

    def __init__(self, clock: Callable[[], int] = time.time_ns) -> None:
        self.bugs = BugCount("kvtiers")
        self._clock = clock
        self.reloaded: Counter[int] = Counter()
        """Answered requests for adapters that vLLM reloads, by number. Counted by the adapters' thread alone."""
        self._to_reload: Counter[int] = Counter()  # those begun
        self._adapters = Adapters()
        self._questions: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, lora: Any) -> DigestRequest:
        """Ask for the digest of the adapter of a request that has come."""
        digesting = self._request_for(lora)
        self.ask(digesting)
        return digesting

    def _request_for(self, lora: Any) -> DigestRequest:
        if lora.load_inplace:
            self._to_reload[lora.lora_int_id] += 1
        return DigestRequest(self, lora, self._clock())

    def ask(self, question: Question) -> None:
        """Queue a question; if too many wait already it is never answered."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvtiers-adapters", daemon=True)
            self._thread.start()
        if self._questions.qsize() < _MOST_WAITING:
            self._questions.put(question)

    def changes(self, number: int) -> int:
        """Return how often the adapter of this number was found to be another."""
        return self._adapters.changes[number]

    def is_reloading(self, number: int) -> bool:
        """Return whether vLLM reloads the adapter for a request whose digest is not there yet."""
        return self._to_reload[number] != self.reloaded[number]

    @never_raises(lambda: None)
    def digest_before_loading(self, lora: Any) -> None:
        """Ask for the digest of an adapter that vLLM is about to load without a request; wait a moment for it."""
        digesting = self._request_for(lora)
        # Not behind others' digests: vLLM reads the same files next, which takes longer than to examine them.
        threading.Thread(target=digesting.examine, name="kvtiers-adapter", daemon=True).start()
        digesting.examined.wait(_LOAD_SECONDS)
        digesting.vllm_may_load()
        self.ask(digesting)

    def close(self) -> None:
        """End the thread after its current answer; do not wait for a file system that hangs."""
        self._questions.put(None)

    def _run(self) -> None:
        while (question := self._questions.get()) is not None:
            # A question that fails has no answer, and its request uses no tiers.
            with logged_boundary(_log, "an adapter's files cannot be examined; a bug of kvtiers"):
                question.answer(self._adapters)
