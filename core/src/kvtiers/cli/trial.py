"""Trial calls of what others have installed: in a forked child, so that one that hangs or exits ends nothing else.

An import may do anything: never return, or end its process. A list of what is installed has a line for it all the same.
"""

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from kvtiers._process import die_with_parent
from kvtiers.api import TierPluginError

__all__ = ["tried"]

_SECONDS = 10.0
_MOST_BYTES = 1 << 12  # a pipe takes that much without a reader


def tried(what: str, call: Callable[[], str], seconds: float = _SECONDS) -> str:
    """Return what a call returns in a child; TierPluginError, beginning with ``what``, if it ends or hangs there.

    Where this process has several threads, the call is made here: a child would inherit their locks.
    """
    if threading.active_count() > 1:
        return call()
    receive, send = os.pipe()
    parent = os.getpid()
    if not (pid := os.fork()):
        _answer(call, send, parent)
    os.close(send)
    answer = None
    try:
        answer = _read(receive, time.monotonic() + seconds)
    finally:
        os.close(receive)
        if answer is None:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if answer is None:
        raise TierPluginError(f"{what} cannot be used: its import has not ended within {seconds:g}s")
    if answer[:1] == b"+":
        return answer[1:].decode("utf-8", "replace")
    if answer:
        raise TierPluginError(answer[1:].decode("utf-8", "replace"))
    how = f"with exit status {os.WEXITSTATUS(status)}" if os.WIFEXITED(status) else f"by signal {os.WTERMSIG(status)}"
    raise TierPluginError(f"{what} cannot be used: its import ends the process {how}")


def _answer(call: Callable[[], str], send: int, parent: int) -> NoReturn:
    """Make the call, in the child, and end it there, without what an exit of the parent's would do."""
    try:
        die_with_parent(parent)
        try:
            answer = f"+{call()}"
        except TierPluginError as error:
            answer = f"-{error}"
        os.write(send, answer.encode()[:_MOST_BYTES])
    finally:
        os._exit(0)


def _read(receive: int, until: float) -> bytes | None:
    """Return what the child has written, to its end; None if there is no end in time."""
    answer = b""
    while select.select([receive], [], [], max(0.0, until - time.monotonic()))[0]:
        data = os.read(receive, _MOST_BYTES)
        answer += data
        if not data:
            return answer
    return None
