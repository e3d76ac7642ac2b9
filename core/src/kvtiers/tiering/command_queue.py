"""The queue of an operator's commands to a running engine, which each step looks at.

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
from collections.abc import Callable, Mapping
from typing import Any

from kvtiers._failures import error_text
from kvtiers.api import KvtiersError

__all__ = ["Command", "CommandQueue", "CommandRefused"]

_MOST_WAITING = 64
_IN_ONE_STEP = 8


class CommandRefused(KvtiersError):  # noqa: N818 -- an answer, as NotKept is
    """A command that cannot be carried out; nothing was changed. The text is one line for the operator.

    ``logged``: the same for the log and for all who get it, where that is less, as of a file of which it quotes.
    """

    def __init__(self, text: str, logged: str = "") -> None:
        super().__init__(text)
        self.logged = logged or text


class Command:
    """A command. ``work``: on the engine's thread; it returns the answer, or None to be called in the next step."""

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
    """The commands that wait for a step. ``waiting`` is what a step looks at.

    ``wake``: called after each that is posted, by its thread, for an engine that may sleep while it has no request.
    """

    def __init__(self) -> None:
        self.waiting: deque[Command] = deque()
        self.wake: Callable[[], None] = lambda: None

    def post(self, command: Command) -> bool:
        """Queue a command; False if too many wait. From any thread."""
        if len(self.waiting) >= _MOST_WAITING:
            return False
        self.waiting.append(command)
        self.wake()
        return True

    def run(self) -> None:
        """Work on the commands that wait, a bounded number: for the engine's thread, at the begin of a step."""
        for _ in range(min(len(self.waiting), _IN_ONE_STEP)):
            command = self.waiting.popleft()
            if command.step():
                self.waiting.append(command)
