"""The thread that sends a host's messages."""

import socket
import threading

from kvtiers.host.sender import HostSender


def test_a_host_rests_once_after_it_had_something_to_say():
    ours, theirs = socket.socketpair()
    rested = threading.Semaphore(0)
    ticks = threading.Semaphore(0)

    def figures():
        ticks.release()
        return b"figures"

    writer = HostSender(theirs, figures, lambda: False, rested.release)
    with ours, theirs:
        writer.start()
        for _ in range(2):
            writer.post(b"event")
            assert rested.acquire(timeout=60)
        for _ in range(3):
            assert ticks.acquire(timeout=60)
        assert not rested.acquire(blocking=False), "it had rested already"
        writer.close(60)
        assert ours.recv(1 << 16).count(b"event") == 2
