"""A tier over vLLM's memory: in a tier host that maps its file, or in the engine's where there is none to map."""

import base64
import logging
import mmap
import os
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from kvtiers._log_queue import LOGGERS, flush_logs
from kvtiers.api import StartError, make_offload_key
from kvtiers.testing.running import descriptors_left_since, open_descriptors, threads_left_since
from kvtiers_vllm.engine import CoreLink
from kvtiers_vllm.own_tiering.build import begin_start_line, open_tier
from kvtiers_vllm.own_tiering.options import load_tier_options

from .test_identity import engine, offloading

ROW, ROWS = 8192, 8
PATIENCE = 60.0
KEY = make_offload_key(b"h" * 32, 0)
CONTENT = os.urandom(ROW)


@pytest.fixture
def file():
    path = Path("/dev/shm") / f"kvtiers-test-opening-{os.getpid()}"
    path.write_bytes(bytes(ROW * ROWS))
    yield path
    path.unlink()


@pytest.fixture(params=["a file", "no file"])
def memory(request, file):
    """Rows as vLLM has them, and rows without a file behind them."""
    with file.open("r+b") as behind:
        return mmap.mmap(behind.fileno() if request.param == "a file" else -1, ROW * ROWS), request.param == "a file"


def end_of(driver, job_id):
    until = time.monotonic() + PATIENCE
    while not (results := driver.finished()):
        assert time.monotonic() < until, f"job {job_id} never ends"
        driver.end_step()
    (result,) = results
    assert (result.job_id, result.success) == (job_id, True)


@pytest.mark.parametrize("encryption", [{}, {"encryption": {"key": {"env": "KV_KEY"}}}], ids=["plain", "encrypted"])
def test_a_value_goes_down_and_comes_back_in_a_tier_host_or_with_one_line_in_this_process(
    memory, file, caplog, monkeypatch, encryption
):
    monkeypatch.setenv("KV_KEY", base64.b64encode(os.urandom(32)).decode())
    caplog.set_level(logging.INFO, "kvtiers")
    monkeypatch.setattr("kvtiers_vllm.identity._device", lambda: {"name": "some GPU"})
    rows, is_mapped = memory
    before = file.stat()
    view = memoryview(rows).cast("B", (ROWS, ROW))
    options = {"capacity": "1MiB", "required": True}
    patient = {"weights": "v1", "load_wait": "60s", **encryption}  # a busy machine is to cost time here, not the load
    config, settings = load_tier_options("kvtiers-memory", options, {"kvtiers": patient})
    opened = open_tier(config, settings, offloading(), view, engine(), CoreLink(), "0.32.0")
    driver = opened.driver
    driver.request_started("request", None)
    assert driver.finished() == [], "vLLM asks first, and the event that the tier is open comes so"
    rows[2 * ROW : 3 * ROW] = CONTENT
    driver.submit(1, [KEY], [2], "request", is_promotion=False)
    end_of(driver, 1)
    rows[2 * ROW : 3 * ROW] = bytes(ROW)
    driver.submit(2, [KEY], [5], "request", is_promotion=True)
    end_of(driver, 2)
    expected = bytes(5 * ROW) + CONTENT + bytes(2 * ROW)
    assert rows[:] == expected, "its own row has it, and nothing else was touched"
    flush_logs(PATIENCE)
    lines = [record.getMessage() for record in caplog.records if "its io is 'thread'" in record.getMessage()]
    assert len(lines) == (not is_mapped)
    assert caplog.text.count("memory: encrypted: key ") == len(encryption)
    assert driver.own_stats().get("host_starts", 0) == is_mapped
    driver.close(1.0)
    view.release()
    with closing(rows):
        assert rows[:] == expected
    after = file.stat()
    assert (after.st_ino, after.st_size, after.st_nlink) == (before.st_ino, before.st_size, 1)


def test_a_required_tier_that_cannot_be_opened_is_refused_as_vllms_own_are(memory, monkeypatch):
    monkeypatch.setattr("kvtiers_vllm.identity._device", lambda: {"name": "some GPU"})
    rows, _ = memory
    options = {"path": "/dev/null/no-folder", "capacity": "1MiB", "required": True, "io": "thread"}
    config, settings = load_tier_options("kvtiers-fs", options, {"kvtiers": {"weights": "v1"}})
    with closing(rows), memoryview(rows).cast("B", (ROWS, ROW)) as view:
        with pytest.raises(OSError, match=r"^fs: required, but cannot be opened: ") as refused:
            open_tier(config, settings, offloading(), view, engine(), CoreLink(), "0.32.0")
        assert isinstance(refused.value, StartError), "one line of the log says it"


@pytest.mark.parametrize("estimate", [None, 7e-4])
def test_until_something_was_computed_the_dearer_of_prior_and_estimate_stands(file, monkeypatch, estimate):
    monkeypatch.setattr("kvtiers_vllm.identity._device", lambda: {"name": "some CPU"})
    monkeypatch.setattr("kvtiers_vllm.own_tiering.build.estimated_prefill_seconds", lambda _config: estimate)
    config, settings = load_tier_options("kvtiers-memory", {"capacity": "1MiB"}, {"kvtiers": {"weights": "v1"}})
    with (
        file.open("r+b") as behind,
        mmap.mmap(behind.fileno(), ROW * ROWS) as rows,
        memoryview(rows).cast("B", (ROWS, ROW)) as view,
    ):
        driver = open_tier(config, settings, offloading(), view, engine(), CoreLink(), "0.32.0").driver
        found = driver._waits.cost.seconds_per_token
        driver.close(10.0)
    assert found == 7e-4 if estimate else 0 < found < 7e-4


def test_a_tier_that_cannot_have_a_thread_leaves_nothing_behind(memory, monkeypatch):
    """Once for each thread that the engine's starts: it is refused, those before it are not."""
    started, refused, start, engines = 0, 0, threading.Thread.start, threading.current_thread()

    def counted(thread):
        nonlocal started
        if threading.current_thread() is engines:
            started += 1
            if started == refused:
                raise RuntimeError("can't start new thread")
        start(thread)

    def open_one():
        config, settings = load_tier_options("kvtiers-memory", {"capacity": "1MiB"}, {"kvtiers": {"weights": "v1"}})
        opened = open_tier(config, settings, offloading(), view, engine(), CoreLink(), "0.32.0")
        try:
            return opened, begin_start_line([opened])
        except RuntimeError:
            opened.driver.close(10.0)  # as the engine's end does
            raise

    monkeypatch.setattr("kvtiers_vllm.identity._device", lambda: {"name": "some GPU"})
    monkeypatch.setattr(threading.Thread, "start", counted)
    rows, _ = memory
    with memoryview(rows).cast("B", (ROWS, ROW)) as view:
        (opened, line), needed = open_one(), started
        line.close()
        opened.driver.close(10.0)
        assert needed >= 3
        threads, descriptors = set(threading.enumerate()), open_descriptors()
        for refused in range(1, needed + 1):
            started = 0
            with pytest.raises(RuntimeError, match="can't start new thread"):
                open_one()
            assert not threads_left_since(threads), refused
            assert not descriptors_left_since(descriptors), refused
            assert not [name for name in LOGGERS if logging.getLogger(name).filters], refused
