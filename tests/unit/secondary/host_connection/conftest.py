"""A tier's host whose other end the test plays, and all its lives."""

import subprocess
import sys
import time
from collections import deque
from types import SimpleNamespace

import pytest
from tests.unit.secondary.host_connection.scripted_host import Host

from kvtiers.host import wire
from kvtiers.host.messages import Hello
from kvtiers.secondary.host_client import HostClient
from kvtiers.secondary.host_connection import HostConnection
from kvtiers.secondary.supervisor import HostLauncher, HostPace, HostProcess


@pytest.fixture
def pace():
    return HostPace(first_delay=0.01)


@pytest.fixture
def is_awaited():
    return False


@pytest.fixture
def wound():
    """The seconds by which the connection's clock is ahead, in a list."""
    return [0.0]


@pytest.fixture
def ends(kit, monkeypatch, pace, is_awaited, wound):
    """A tier's host, and all its lives, of which the test plays each."""
    hosts, processes = [], []

    def fork(_launcher, _host, theirs, _handover):
        hosts.append(Host(theirs.dup()))
        processes.append(subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]))
        return processes[-1]

    monkeypatch.setattr(HostLauncher, "_fork", fork)
    launcher = HostLauncher(0, pace=pace)
    process = HostProcess("test", lambda: wire.encode(Hello("{}")))
    link = HostConnection(launcher, process, deque(maxlen=2), lambda: time.monotonic() + wound[0])
    tier = HostClient(link, kit.NAMES, deadline=kit.PATIENCE, grace=kit.PATIENCE, is_awaited=is_awaited)
    launcher.start(process)

    def poll(*, until=None):
        """Poll until an event of this kind has come; return all that came."""
        events = list(tier.poll())
        if until is not None:
            kit.wait_until(
                lambda: events.extend(tier.poll()) or any(isinstance(event, until) for event in events),
                f"a {until.__name__}",
            )
        return events

    kit.wait_until(lambda: link.poll() or link.connected, "the first life")
    yield SimpleNamespace(hosts=hosts, link=link, tier=tier, process=process, processes=processes, poll=poll)
    launcher.close(0.0)
    link.detach()
    for host in hosts:
        host.socket.close()
    kit.wait_until(lambda: all(process.returncode is not None for process in processes), "the last one's burial")
