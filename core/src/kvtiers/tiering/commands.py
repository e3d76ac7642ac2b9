"""Commands of an operator to a running engine: a bounded queue that each step looks at, and what each command does.

=================  ==========================================================================================
thread             does
=================  ==========================================================================================
any                ``post``s a command, waits for its answer, withdraws it
the engine's       ``run``s what is waiting at the begin of a step; without commands a step asks for the queue's
                   truth value, and no more
=================  ==========================================================================================

A command has begun or is withdrawn, never both: so an answer that says that nothing was changed is true.
"""

import queue
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from kvtiers._failures import error_text
from kvtiers.api import KvtiersError
from kvtiers.tiering.tier_slot import TierSlot

__all__ = ["Command", "CommandQueue", "CommandRefused", "TierSwitches"]

_MOST_WAITING = 64
_IN_ONE_STEP = 8
SWITCHES = ("on", "off", "read-only")


class CommandRefused(KvtiersError):  # noqa: N818 -- an answer, as WritesRefused is
    """A command that cannot be carried out; nothing was changed. The text is one line for the operator."""


class Command:
    """A command. ``work``: on the engine's thread; what it returns is the answer, None: to be called in the next step.

    ``on_withdrawn``: what the work has done so far, for a command of several steps that is withdrawn.
    """

    def __init__(self, work: Callable[[], Mapping[str, Any] | None]) -> None:
        self._work = work
        self._right_to_begin = [True]  # taken by the one that begins the command, or withdraws it: one call, no lock
        self._answers: queue.SimpleQueue[Mapping[str, Any] | CommandRefused] = queue.SimpleQueue()
        self._has_begun = False
        self._is_withdrawn = False

    def answer(self, seconds: float) -> Mapping[str, Any]:
        """Wait for the answer; CommandRefused if it is refused, ``queue.Empty`` if there is none in time."""
        answer = self._answers.get(timeout=max(0.0, seconds))
        if isinstance(answer, CommandRefused):
            raise answer
        return answer

    def withdraw(self) -> bool:
        """Withdraw the command; True: it had not begun, so nothing was changed. Else no further step works on it."""
        self._is_withdrawn = True
        return self._take_right()

    def step(self) -> bool:
        """Work on the command for this step, on the engine's thread; return whether it goes on in the next one."""
        if not self._has_begun:
            if not self._take_right():
                return False
            self._has_begun = True
        elif self._is_withdrawn:
            return False
        try:
            answer = self._work()
        except CommandRefused as refusal:
            self._answers.put(refusal)
            return False
        except Exception as error:  # noqa: BLE001 -- nothing may raise into the engine's step
            self._answers.put(CommandRefused(f"{error_text(error)}; a bug of kvtiers"))
            return False
        if answer is None:
            return True
        self._answers.put(answer)
        return False

    def _take_right(self) -> bool:
        try:
            return self._right_to_begin.pop()
        except IndexError:
            return False


class CommandQueue:
    """The commands that wait for a step. ``waiting`` is what a step looks at."""

    def __init__(self) -> None:
        self.waiting: deque[Command] = deque()

    def post(self, command: Command) -> bool:
        """Queue a command; False if too many wait. From any thread."""
        if len(self.waiting) >= _MOST_WAITING:
            return False
        self.waiting.append(command)
        return True

    def run(self) -> None:
        """Work on the commands that wait, a bounded number: for the engine's thread, at the begin of a step."""
        for _ in range(min(len(self.waiting), _IN_ONE_STEP)):
            command = self.waiting.popleft()
            if command.step():
                self.waiting.append(command)


class CancelsLoads(Protocol):
    """What has loads of a tier that can be cancelled."""

    def cancel_loads(self, slot: TierSlot) -> int:
        """Make misses of the tier's loads that have not landed; return how many chunks they were to bring."""


class TierSwitches:
    """Puts tiers in and out of use; engine's thread. ``loads``: what may have loads of a tier, in the order of a load.

    A tier that is switched off is asked nothing and given nothing. Its loads are misses at once, and their rows come
    back when nothing of the tier can touch them any more, as with a load that fails. Its stores are written to the end.
    """

    def __init__(self, slots: Sequence[TierSlot], loads: Sequence[CancelsLoads]) -> None:
        self._slots = slots
        self._loads = loads

    def slot(self, name: str) -> TierSlot:
        """Return the tier of this name; CommandRefused, with the names there are, if there is none."""
        for slot in self._slots:
            if slot.name == name:
                return slot
        names = ", ".join(slot.name for slot in self._slots) or "no tier at all"
        raise CommandRefused(f"there is no tier {name!r}; this engine has {names}")

    def switch(self, name: str, to: str) -> dict[str, Any]:
        """Switch a tier; return what it was and is, and what has become of its jobs. One that is so already stays."""
        slot = self.slot(name)
        if to not in SWITCHES:
            raise CommandRefused(f"a tier cannot be switched to {to!r}; expected {', '.join(SWITCHES)}")
        if slot.retired:
            raise CommandRefused(f"{name}: out of use for good: {slot.retired}")
        was, metrics = slot.switch, slot.metrics
        metrics.switched_off = int(to == "off")
        metrics.switched_read_only = int(to == "read-only")
        cancelled = sum(loads.cancel_loads(slot) for loads in self._loads) if to == "off" != was else 0
        return {
            "tier": name,
            "was": was,
            "is": slot.switch,
            "cancelled_chunks": cancelled,
            "running_jobs": metrics.running_jobs,
        }
