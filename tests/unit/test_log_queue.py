"""Lines are handled by a thread of their own while an engine runs, as the user has configured, else as before."""

import contextlib
import logging
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvtiers import _log_queue
from kvtiers._log_queue import LOGGERS, dropped_lines, flush_logs, queue_logs

PATIENCE = 60.0
_log = logging.getLogger("kvtiers.tiering")


class Lines(logging.Handler):
    """What was handled, and by which thread; at a gate, if there is one."""

    def __init__(self, gate=None):
        super().__init__()
        self.gate = gate
        self.lines = []
        self.threads = set()

    def emit(self, record):
        if self.gate is not None:
            assert self.gate.wait(PATIENCE), "the gate stays shut"
        self.lines.append(record.getMessage())
        self.threads.add(threading.current_thread().name)


@pytest.fixture
def handler():
    """Have lines of this logger handled; the handler is removed at the end."""
    added = []

    def add(logger="kvtiers", **options):
        added.append((logging.getLogger(logger), Lines(**options)))
        added[-1][0].addHandler(added[-1][1])
        return added[-1][1]

    yield add
    for logger, lines in added:
        logger.removeHandler(lines)


@pytest.fixture
def full_pipe():
    """The two ends of a pipe that takes nothing more, whose writers block."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for piece in (b"x" * 65536, b"x"):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, piece)
    os.set_blocking(writer, True)
    yield reader, writer
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("place", ["kvtiers.tiering", "kvtiers", None])
def test_while_the_queue_is_used_another_thread_handles_the_lines_wherever_the_handler_is(handler, place):
    lines = handler(place)
    logs, more = queue_logs(), queue_logs()
    for number in range(100):
        _log.warning("line %d", number)
    more.close()
    more.close()  # counts once
    _log.warning("line %d", 100)
    logs.close(PATIENCE)
    assert lines.lines == [f"line {number}" for number in range(101)]
    assert len(lines.threads) == 1
    assert threading.current_thread().name not in lines.threads
    _log.warning("after it")
    assert lines.lines[-1] == "after it"
    assert threading.current_thread().name in lines.threads


def test_levels_and_filters_stay_what_they_are(handler, caplog):
    lines = handler()
    caplog.set_level(logging.WARNING, "kvtiers.tiering")
    logs = queue_logs()
    _log.info("not wanted")
    lines.addFilter(lambda record: "secret" not in record.getMessage())
    _log.warning("a %s", "secret")
    _log.warning("a line")
    logs.close(PATIENCE)
    assert lines.lines == ["a line"]


@pytest.mark.parametrize("logger", ["kvtiers", "kvtiers.tiering"])
def test_filters_of_the_user_see_each_line_once_and_on_the_other_thread_alone(handler, logger):
    lines, log = handler(), logging.getLogger(logger)
    seen, threads = [], set()

    def passes(record):
        seen.append(record.getMessage())
        threads.add(threading.current_thread().name)
        if seen[-1] == "broken":
            raise KeyError("request_id")
        return seen[-1] != "secret"

    log.addFilter(passes)
    logs, more = queue_logs(), queue_logs()
    try:
        for text in ("one", "broken", "secret", "two"):
            log.warning(text)
        more.close(PATIENCE)
        log.warning("three")
    finally:
        more.close(PATIENCE)
        logs.close(PATIENCE)
        log.removeFilter(passes)
    assert seen == ["one", "broken", "secret", "two", "three"]
    assert lines.lines == ["one", "two", "three"]
    assert threading.current_thread().name not in threads


def test_a_line_says_what_it_said_when_it_was_logged_and_keeps_nothing_alive(handler, caplog):
    logs = queue_logs()
    said = ["at once"]
    try:
        int("with its traceback")
    except ValueError:
        _log.exception("%s", said)
    said.append("later")
    _log.warning("%s", "x" * 10_000_000)
    _log.warning("%d %d", 1)
    logs.close(PATIENCE)
    first, long, wrong = caplog.records
    assert first.getMessage().startswith("['at once']\nTraceback")
    assert first.exc_info is None
    assert "with its traceback" in first.getMessage()
    assert len(long.getMessage()) < 4_000
    assert "cannot be shown" in wrong.getMessage()


def test_a_log_that_stands_still_holds_up_no_thread_and_what_is_dropped_is_counted_and_said(handler):
    gate = threading.Event()
    lines = handler(gate=gate)
    before = dropped_lines()
    logs = queue_logs()
    for number in range(5_000):
        _log.warning("line %d", number)
    dropped = dropped_lines() - before
    assert 3_900 <= dropped <= 4_000
    gate.set()
    flush_logs(PATIENCE)
    _log.warning("the end")
    logs.close(PATIENCE)
    assert f"{dropped} log lines were dropped, since the log is too slow" in lines.lines
    assert lines.lines[-1] == "the end"
    assert len(lines.lines) == 5_000 - dropped + 2
    assert dropped_lines() - before == dropped


@pytest.mark.parametrize("error", [RuntimeError("broken"), SystemExit(1)])
def test_a_handler_that_raises_ends_nothing(handler, error):
    broken, lines = handler("kvtiers.tiering"), handler()

    def emit(_record):
        raise error

    broken.emit = emit
    logs = queue_logs()
    _log.warning("one")
    logging.getLogger("kvtiers").warning("two")
    logs.close(PATIENCE)
    assert lines.lines == ["two"]


def test_a_forked_child_handles_its_lines_itself(handler):
    lines = handler()
    logs = queue_logs()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _log.warning("in the child")
            status = int(lines.lines != ["in the child"])
            child = queue_logs()  # and may use a queue of its own
            _log.warning("queued in the child")
            child.close(PATIENCE)
            status |= int(lines.lines[-1] != "queued in the child")
            lines.threads.clear()
            child = queue_logs()
            logs.close(PATIENCE)  # the parent's use of its queue ends nothing here
            _log.warning("still queued in the child")
            child.close(PATIENCE)
            status |= int(threading.current_thread().name in lines.threads)
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    logs.close(PATIENCE)


def test_a_process_that_ends_without_closing_loses_no_line():
    code = (
        "import logging; logging.basicConfig(level='WARNING', format='%(message)s')\n"
        "from kvtiers._log_queue import queue_logs; queue_logs()\n"
        "for number in range(500): logging.getLogger('kvtiers.region').warning('line %d', number)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stderr.splitlines() == [f"line {number}" for number in range(500)]


def test_lines_that_are_logged_while_the_last_user_leaves_are_all_handled(handler):
    lines = handler()
    numbers = range(900)  # fewer than may wait
    before = dropped_lines()
    thread = threading.Thread(target=lambda: [_log.warning("line %d", number) for number in numbers])
    thread.start()
    while thread.is_alive():
        queue_logs().close(PATIENCE)
    thread.join()
    assert dropped_lines() == before
    assert sorted(lines.lines) == sorted(f"line {number}" for number in numbers)


def test_while_a_handler_takes_no_line_no_other_thread_gets_to_it_after_the_last_user_either(handler):
    gate = threading.Event()
    lines = handler(gate=gate)
    before = dropped_lines()
    logs = queue_logs()
    _log.warning("keeps the handler")
    logs.close(0.01)
    _log.warning("after it")  # returns
    more = queue_logs()
    more.close(0.01)
    gate.set()
    flush_logs(PATIENCE)
    assert lines.lines == ["keeps the handler", "after it"]
    assert threading.current_thread().name not in lines.threads
    more = queue_logs()
    more.close(PATIENCE)
    _log.warning("handled here")
    assert threading.current_thread().name in lines.threads
    assert dropped_lines() == before


ENGINE_THAT_ENDS = """
import atexit, logging, os, sys
atexit.register(os.write, int(sys.argv[1]), b"the user's own")
logging.basicConfig(level="WARNING")
from kvtiers._log_queue import queue_logs
logs = queue_logs()
for number in range(10): logging.getLogger("kvtiers.region").warning("x" * int(sys.argv[2]))
if sys.argv[3] == "closed": logs.close()
logging.getLogger("kvtiers.region").warning("a last line")
sys.exit(7)
"""


@pytest.mark.parametrize(("length", "end"), [(10, "closed"), (3_400, "open")], ids=["closed", "long lines"])
def test_a_process_whose_standard_error_is_full_and_never_read_ends_with_its_own_status(full_pipe, length, end):
    reader, writer = full_pipe
    if end == "open":
        os.read(reader, 4_096)
    said, say = os.pipe()
    command = [sys.executable, "-c", ENGINE_THAT_ENDS, str(say), str(length), end]
    with subprocess.Popen(command, stderr=writer, pass_fds=[say]) as process:
        os.close(say)
        try:
            assert process.wait(PATIENCE) == 7
            assert os.read(said, 100) == b"the user's own"
        finally:
            process.kill()
            os.close(said)


def test_every_logger_of_core_the_integrations_and_the_policies_is_queued():
    root = Path(__file__).parents[2]
    folders = ["core/src", "integrations/*/src", "plugins/policies/src"]
    sources = [path for folder in folders for path in root.glob(f"{folder}/**/*.py")]
    used = {name for path in sources for name in re.findall(r'getLogger\("(kvtiers[^"]*)"\)', path.read_text())}
    assert used == set(LOGGERS)
    logs = queue_logs()
    assert all(_log_queue._log_queue in logging.getLogger(name).filters for name in LOGGERS)
    logs.close(PATIENCE)
    assert not any(_log_queue._log_queue in logging.getLogger(name).filters for name in LOGGERS)
