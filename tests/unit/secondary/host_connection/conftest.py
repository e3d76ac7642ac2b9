"""Two tiers in one host whose other end the test plays, and all its lives."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from tests.unit.secondary.host_connection.scripted_host import Host

from kvtiers.host import wire
from kvtiers.host.messages import Hello
from kvtiers.secondary.host_client import HostClient
from kvtiers.secondary.host_connection import HostConnection
from kvtiers.secondary.log_thread import LogThread
from kvtiers.secondary.supervisor import HostLauncher, HostProcess


@pytest.fixture
def ends(kit, monkeypatch):
    """Two tiers in one host, the second with time to spare, and all its lives, of which the test plays each."""
    hosts, processes = [], []

    def fork(_launcher, _host, theirs, _handover):
        hosts.append(Host(theirs.dup()))
        processes.append(subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]))
        return processes[-1]

    monkeypatch.setattr(HostLauncher, "_fork", fork)
    monkeypatch.setattr("kvtiers.secondary.supervisor._FIRST_DELAY", 0.01)
    logs = LogThread()
    launcher = HostLauncher(0, logs.post)
    process = HostProcess("test", lambda: wire.encode(0, Hello("{}")))
    link = HostConnection(launcher, process, logs)
    tiers = [HostClient(link, kit.NAMES, deadline=kit.PATIENCE, grace=grace) for grace in (0.05, kit.PATIENCE)]
    launcher.start(process)

    def poll(tier=0, *, until=None):
        """Poll until an event of this kind has come; return all that came."""
        events = list(tiers[tier].poll())
        if until is not None:
            kit.wait_until(
                lambda: events.extend(tiers[tier].poll()) or any(isinstance(event, until) for event in events),
                f"a {until.__name__}",
            )
        return events

    kit.wait_until(lambda: tiers[0].poll() or link.connected, "the first life")
    yield SimpleNamespace(hosts=hosts, link=link, tiers=tiers, process=process, processes=processes, poll=poll)
    launcher.close(0.0)
    link.detach()
    for host in hosts:
        host.socket.close()
    logs.close(kit.PATIENCE)
    assert all(process.returncode is not None for process in processes)
