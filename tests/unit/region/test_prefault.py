"""The end of a pre-fault program that the kernel holds, on a clock that each wait winds."""

import mmap
import os
import subprocess
from types import SimpleNamespace

import pytest

from kvtiers.region import prefault as prefault_module
from kvtiers.region import server
from kvtiers.region.memfd import create_memfd
from kvtiers.region.prefault import Prefault


def test_a_region_waits_as_long_as_its_program_takes_that_cannot_be_killed(monkeypatch):
    fd = create_memfd("kvtiers-test", mmap.PAGESIZE)
    prefault = Prefault(fd, mmap.PAGESIZE, mmap.PAGESIZE)
    program, thread, clock = prefault._process, prefault._thread, SimpleNamespace(now=1000.0)

    def wait(seconds):
        clock.now += seconds
        raise subprocess.TimeoutExpired("populate", seconds)

    def join(seconds):
        clock.now += seconds

    monkeypatch.setattr(prefault_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    prefault._process = SimpleNamespace(kill=program.kill, wait=wait)
    prefault._thread = SimpleNamespace(join=join)
    prefault.stop()
    program.wait()
    thread.join()
    os.close(fd)
    assert clock.now - 1000.0 == pytest.approx(prefault_module.STOP_SECONDS)
    assert clock.now - 1000.0 < server._STOP_SECONDS
