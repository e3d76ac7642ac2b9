"""The thread that starts, watches and kills hosts; what comes of it all is in ``tests/integration/hosts``."""

import os
import subprocess
import sys
import threading

import pytest

from kvtiers.secondary.supervisor import HostLauncher, HostProcess


@pytest.fixture
def launcher(monkeypatch, kit):
    """A launcher whose hosts sleep."""
    processes = []

    def fork(_launcher, _host, _theirs, _handover):
        processes.append(subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]))
        return processes[-1]

    monkeypatch.setattr(HostLauncher, "_fork", fork)
    launcher = HostLauncher(0)
    yield launcher
    monkeypatch.undo()
    for process in processes:
        process.kill()
    launcher.close(0.0)
    kit.wait_until(lambda: not launcher._thread.is_alive(), "the thread's end")


def test_a_host_held_by_the_kernel_is_killed_once_and_not_all_the_time(launcher, caplog, kit, monkeypatch):
    host = HostProcess("held", lambda: b"")
    launcher.start(host)
    kit.wait_until(lambda: host.lives, "its first life")
    life = host.lives.popleft()
    kills, honest = [], os.kill

    def kill(pid, number):
        if pid != life.process.pid:
            return honest(pid, number)
        return kills.append(number)

    monkeypatch.setattr("kvtiers._process.os.kill", kill)
    launcher.kill_after(life, "it hangs", 0.0)
    launcher.all_read(life)
    kit.wait_until(lambda: kills, "the kill")
    for _ in range(10):  # the thread looks at its hosts after each request
        launcher.all_read(life)
        looked = threading.Event()
        launcher._requests.put(looked.set)
        assert looked.wait(kit.PATIENCE)
    assert len(kills) == 1
    assert caplog.messages == ["held: its host is killed: it hangs"]
    assert life.status is None, "its rows are not free yet"
    life.connection.close()
