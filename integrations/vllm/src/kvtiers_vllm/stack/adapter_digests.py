"""The digests of adapters' files, made in a thread of its own, so that the engine's never waits for a file system.

::

    request arrives      a look is begun; without its answer the request has no keys, and finds and stores nothing
    vLLM may begin it    what is looked at later may not be what vLLM loads: it counts if it was old by then
    loaded at a call     (``add_lora``) the same, with a moment for a look that is first in the queue
    store has ended      another look: what vLLM loaded in between is what the keys name, or the store fails
    adapter reloaded     from that request's arrival to its look's answer no request with the adapter has keys

Looks are answered in the order in which they were begun. The engine's thread reads an answer at its next call; neither
thread waits for the other. One case is not covered: files that are replaced between a request's look and vLLM's
first loading of them, while the request is queued; it may then find KV that the earlier files stored.
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

__all__ = ["AdapterLook", "AdapterLooks", "Confirmation", "Question", "Standing"]

_log = logging.getLogger("kvtiers.vllm")
_MOST_WAITING = 10_000  # looks at a file system that hangs
_OLD_NS = 2_000_000_000  # by which clocks of file systems may differ from this machine's
_LOAD_SECONDS = 0.05  # that loading an adapter waits for a look at the files that it is about to read


class Standing(Enum):
    """The state of a request's adapter."""

    UNKNOWN = "not known yet"
    KNOWN = "known, and vLLM's is the same"
    CHANGED = "uncertain, or another one than when the request came"


class Question(Protocol):
    """A question for the looking thread."""

    def answer(self, adapters: Adapters) -> None:
        """Look; on the looking thread."""


@dataclass(slots=True, eq=False)
class Confirmation:
    """The question whether an adapter's files are unchanged."""

    lora: Any
    answered: bool = False
    unchanged: bool = False

    def answer(self, adapters: Adapters) -> None:
        """Look; on the looking thread."""
        self.unchanged = adapters.is_unchanged(self.lora)
        self.answered = True


class AdapterLook:
    """The look at a request's adapter. ``lora``: vLLM's request for it. ``arrived``: when, in ns of the epoch."""

    def __init__(self, looks: "AdapterLooks", lora: Any, arrived: int) -> None:
        self.number: int = lora.lora_int_id
        self.digest = b""
        self.looked = threading.Event()
        """Set when the files have been examined, or cannot be; digesting them takes longer."""
        self._looks = looks
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
        if not self.digest or self._changes != self._looks.changes(self.number):
            return Standing.CHANGED
        return Standing.UNKNOWN if self._looks.is_reloading(self.number) else Standing.KNOWN

    @property
    def was_another(self) -> bool:
        """Return whether this engine had another adapter under this number before."""
        return self._looks.changes(self.number) > 0

    def vllm_may_load(self) -> None:
        """Record that vLLM may load the files from now on."""
        self._late |= not self.looked.is_set()

    def confirm(self) -> Confirmation:
        """Start to check whether the files are still the same."""
        confirmation = Confirmation(self._lora)
        self._looks.ask(confirmation)
        return confirmation

    def look(self) -> Files | OSError:
        """Examine the files, unless that has been done; not on the engine's thread."""
        found = self._found
        if found is None:
            try:
                found = Files.of(self._lora)
            except OSError as error:
                found = error
            self._found = found
            self.looked.set()
        return found

    def answer(self, adapters: Adapters) -> None:
        """Look, and digest what is new; on the looking thread."""
        found = self.look()
        if isinstance(found, OSError):
            adapters.lose(self._lora, f"{type(found).__name__}: {found}")
        else:
            as_loaded = not self._late or found.changed < self._arrived - _OLD_NS
            self.digest = adapters.digest(self._lora, found, as_loaded=as_loaded) or b""
        self._changes = adapters.changes[self.number]
        self._answered = True
        if self._lora.load_inplace:
            self._looks.reloaded[self.number] += 1


class AdapterLooks:
    """The looks at an engine's adapters. Everything but ``answer`` runs on the engine's thread."""

    def __init__(self, clock: Callable[[], int] = time.time_ns) -> None:
        self.bugs = BugCount("kvtiers")
        self._clock = clock
        self.reloaded: Counter[int] = Counter()
        """Answered looks at adapters that vLLM reloads, by number. Counted by the looking thread alone."""
        self._to_reload: Counter[int] = Counter()  # those begun
        self._adapters = Adapters()
        self._questions: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, lora: Any) -> AdapterLook:
        """Begin to look at the adapter of a request that has come."""
        look = self._look_of(lora)
        self.ask(look)
        return look

    def _look_of(self, lora: Any) -> AdapterLook:
        if lora.load_inplace:
            self._to_reload[lora.lora_int_id] += 1
        return AdapterLook(self, lora, self._clock())

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
        """Return whether vLLM reloads the adapter for a request whose look is not answered yet."""
        return self._to_reload[number] != self.reloaded[number]

    @never_raises(lambda: None)
    def look_before_loading(self, lora: Any) -> None:
        """Begin to look at an adapter that vLLM is about to load without a request; wait a moment for it."""
        look = self._look_of(lora)
        # Not behind others' digests: vLLM reads the same files next, which takes longer than this look.
        threading.Thread(target=look.look, name="kvtiers-adapter", daemon=True).start()
        look.looked.wait(_LOAD_SECONDS)
        look.vllm_may_load()
        self.ask(look)

    def close(self) -> None:
        """End the thread after its current answer; do not wait for a file system that hangs."""
        self._questions.put(None)

    def _run(self) -> None:
        while (question := self._questions.get()) is not None:
            with logged_boundary(_log, "adapters cannot be looked at; a bug of kvtiers"):  # its request uses no tiers
                question.answer(self._adapters)
