"""The thread that starts, watches and kills hosts; what comes of it all is in ``tests/integration/hosts``."""

import logging
import os
import subprocess
import sys
import threading
import time

import pytest

from kvtiers._log_queue import queue_logs
from kvtiers.secondary import supervisor
from kvtiers.secondary.supervisor import HostLauncher, HostPace, HostProcess


@pytest.fixture
def launcher(monkeypatch, kit):
    """A launcher whose hosts sleep, and are started again soon."""
    processes = []

    def fork(_launcher, _host, _theirs, _handover):
        processes.append(subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]))
        return processes[-1]

    monkeypatch.setattr(HostLauncher, "_fork", fork)
    launcher = HostLauncher(0, pace=HostPace(first_delay=0.01))
    yield launcher
    hosts = list(launcher._hosts)
    for host in hosts:
        host.ending = True
    monkeypatch.undo()
    for process in processes:
        process.kill()
    launcher.close(0.0)
    kit.wait_until(lambda: not launcher._thread.is_alive(), "the thread's end")
    for life in [life for host in hosts for life in host.lives]:
        life.detach()


def test_no_thread_is_left_when_closing_returns(launcher, kit, monkeypatch):
    """Also none that has reported a host's end, and comes to its own a moment later."""
    honest, before = HostLauncher._wait, set(threading.enumerate())

    def wait(self, *of):
        honest(self, *of)
        time.sleep(0.2)

    monkeypatch.setattr(HostLauncher, "_wait", wait)
    host = HostProcess("ended", lambda: b"")
    launcher.start(host)
    kit.wait_until(lambda: host.lives, "its life")
    launcher.close(0.0)
    assert set(threading.enumerate()) <= before
    host.lives[0].detach()


@pytest.fixture
def log_filter():
    """Have the lines of hosts pass a filter of the user's."""
    log, added = logging.getLogger("kvtiers.secondary"), []

    def add(passes):
        added.append(passes)
        log.addFilter(passes)

    yield add
    for passes in added:
        log.removeFilter(passes)


def test_a_filter_of_the_user_that_raises_ends_no_thread(launcher, log_filter, kit):
    def passes(record):
        return record.request_id  # of another library's records

    log_filter(passes)
    logs = queue_logs()
    try:
        host = HostProcess("filtered", lambda: b"")
        launcher.start(host)
        kit.wait_until(lambda: host.lives, "its first life")
        life = host.lives.popleft()
        life.process.kill()
        kit.wait_until(lambda: host.lives, "its second life")
        assert life.status == -9
    finally:
        logs.close(kit.PATIENCE)
    life.connection.close()


def test_a_record_factory_of_the_user_that_raises_ends_no_thread(launcher, kit):
    refused, honest = [], logging.getLogRecordFactory()

    def make(*args, **kwargs):
        refused.append(args)
        raise LookupError("no request is on")

    host = HostProcess("unlogged", lambda: b"")
    launcher.start(host)
    kit.wait_until(lambda: host.lives, "its first life")
    life = host.lives.popleft()
    logging.setLogRecordFactory(make)
    try:
        life.process.kill()
        kit.wait_until(lambda: host.lives, "its second life")
    finally:
        logging.setLogRecordFactory(honest)
    assert len(refused) >= 2, "the line, and that it could not be written"
    assert life.status == -9
    life.connection.close()


@pytest.mark.parametrize("error", [OSError(24, "no descriptor"), RuntimeError("can't start new thread"), MemoryError()])
def test_a_host_that_cannot_be_tied_is_reaped_and_started_again(launcher, kit, monkeypatch, error):
    tie, given = supervisor.lifeline, []

    def lifeline(process):
        given.append(process)
        if len(given) == 1:
            raise error
        return tie(process)

    monkeypatch.setattr(supervisor, "lifeline", lifeline)
    host = HostProcess("untied", lambda: b"")
    launcher.start(host)
    kit.wait_until(lambda: host.lives, "its life")
    assert given[0].returncode == -9, "killed and reaped"
    assert host.started == 1
    host.lives.popleft().detach()


def test_a_host_has_been_reaped_before_that_is_logged(launcher, log_filter, kit):
    host = HostProcess("reaped", lambda: b"")
    launcher.start(host)
    kit.wait_until(lambda: host.lives, "its first life")
    life = host.lives.popleft()
    statuses = []
    log_filter(lambda _record: statuses.append(life.status))
    life.process.kill()
    kit.wait_until(lambda: statuses, "the line")
    assert statuses == [-9]
    life.connection.close()


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
    life.kill_at["it did not end with the engine"] = 0.0
    assert launcher._pause() is None, "there is nothing to do but to wait"
    assert life.status is None, "its rows are not free yet"
    life.connection.close()
