"""The entry point of a tier host: ties the process to its engine's life before it loads anything else.

Until the parent-death signal is armed, some 15 ms after the fork, a host that has been stopped (SIGSTOP) could neither
arm it nor see the end of its socket. It is therefore in a process group of its own, which the kernel kills when the
engine ends (``_process.lifeline``). For the moment until that is set up, it gets the region only when it is tied.
"""

import contextlib
import faulthandler
import gc
import os
import signal
import sys
from types import FrameType

from kvtiers._process import die_with_parent, take_over
from kvtiers.host.malloc import keep_little

__all__ = ["main"]


def main() -> None:
    """Run a host. Arguments: the descriptors of two sockets, the second for the region's; the engine's process id."""
    socket_fd, handover_fd, parent = map(int, sys.argv[1:4])
    die_with_parent(parent)
    take = take_over(handover_fd)
    # A service manager's SIGTERM reaches every process; the engine, which gets it too, says when to end.
    # Handlers and not SIG_IGN: processes that a store starts must not inherit it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave_to_the_engine)
    _give_way()
    keep_little()
    with contextlib.suppress(RuntimeError, OSError):  # no stderr to write to
        faulthandler.enable()
    gc.disable()  # what is loaded stays: looking through it over and over is a tenth of a host's start
    from kvtiers.host.process import TierHost

    gc.freeze()
    gc.enable()
    try:
        region_fd, *callers_fds = take()
    except (EOFError, OSError):  # the engine has ended
        os._exit(0)
    TierHost(socket_fd, region_fd, callers_fds).run()


def _give_way() -> None:
    """Run as a batch process: the engine's thread is not put off its processor when a message from it wakes us."""
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # forbidden in some containers
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _leave_to_the_engine(_number: int, _frame: FrameType | None) -> None:
    """Do nothing."""
