import logging
import threading

import pytest

from kvtiers.host import sender
from kvtiers.host.messages import SAY_ONCE
from kvtiers.host.sender import send_logs
from kvtiers.secondary import log_thread
from kvtiers.secondary.log_thread import LogThread


def test_lines_are_written_in_order_on_a_thread_of_their_own(caplog):
    caplog.set_level(logging.INFO, "kvtiers")
    logs = LogThread()
    for number in range(100):
        logs.post(logging.INFO, f"line {number} with 100% and {{}}")
    logs.close(60)
    assert [record.getMessage() for record in caplog.records] == [
        f"line {number} with 100% and {{}}" for number in range(100)
    ]
    assert {record.threadName for record in caplog.records} == {"kvtiers-log"}


def test_a_log_that_stands_still_blocks_no_thread_and_says_what_was_dropped(monkeypatch):
    monkeypatch.setattr(log_thread, "_MOST_WAITING", 50)
    gate, lines = threading.Event(), []

    class Stuck(logging.Handler):
        def emit(self, record):
            assert gate.wait(60)
            lines.append(record.getMessage())

    handler = Stuck()
    logger = logging.getLogger("kvtiers.secondary")
    logger.addHandler(handler)
    try:
        logs = LogThread()
        for number in range(1000):
            logs.post(logging.WARNING, f"line {number}")
        gate.set()
        logs.close(60)
    finally:
        logger.removeHandler(handler)
    assert lines[0] == "line 0"
    assert len(lines) < 60
    assert any("log lines were dropped" in line for line in lines)


def test_lines_wait_until_a_thread_can_be_had(caplog, monkeypatch):
    start, attempts = threading.Thread.start, []

    def start_at_the_third_attempt(thread):
        attempts.append(thread.name)
        if len(attempts) < 3:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_at_the_third_attempt)
    logs = LogThread()
    for number in range(2):
        logs.post(logging.WARNING, f"line {number}")
    logs.close(60)
    assert [record.getMessage() for record in caplog.records] == ["line 0", "line 1"]


def test_what_is_to_be_said_once_is_written_once_for_each_text(caplog, monkeypatch):
    monkeypatch.setattr(log_thread, "_MOST_REMEMBERED", 2)
    logs = LogThread()
    for text in ("a: clear", "b: clear", "a: clear", "b: clear"):
        logs.post(logging.WARNING | SAY_ONCE, text)
    for _ in range(2):
        logs.post(logging.WARNING, "a: clear")
    for text in ("c", "a: clear", "a: clear"):  # what was said long ago is not remembered
        logs.post(logging.WARNING | SAY_ONCE, text)
    logs.close(60)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["a: clear", "b: clear", "a: clear", "a: clear", "c", "a: clear"]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_a_line_that_finds_no_room_is_not_counted_as_said(caplog, monkeypatch):
    logs = LogThread()
    monkeypatch.setattr(log_thread, "_MOST_WAITING", 0)
    logs.post(logging.WARNING | SAY_ONCE, "clear")
    monkeypatch.setattr(log_thread, "_MOST_WAITING", 1000)
    logs.post(logging.WARNING | SAY_ONCE, "clear")
    logs.close(60)
    assert "clear" in [record.getMessage() for record in caplog.records]


def test_an_unused_log_has_no_thread():
    before = set(threading.enumerate())
    LogThread().close(60)
    assert set(threading.enumerate()) <= before


@pytest.fixture
def sent():
    """Lines that were sent by a host's root logger, which is put back afterwards."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    lines = []

    def send(level, text):
        lines.append((level, text))
        return True

    send_logs("cache", logging.INFO, send)
    yield lines
    logging.captureWarnings(False)
    root.handlers[:] = before
    root.setLevel(level)


def test_a_line_bears_the_name_of_the_tier_once(sent):
    logging.getLogger("client").warning("slow: %s", 3)
    logging.getLogger("kvtiers.secondary").error("cache: gone")
    assert sent == [(logging.WARNING, "cache: slow: 3"), (logging.ERROR, "cache: gone")]


def test_a_line_that_is_to_be_said_once_is_marked(sent):
    log = logging.getLogger("client")
    log.warning("clear text", extra={"once": True})
    log.log(250, "a level of its own")
    assert sent == [(logging.WARNING | SAY_ONCE, "cache: clear text"), (SAY_ONCE - 1, "cache: a level of its own")]


def test_lines_for_debugging_are_never_sent(sent):
    logging.getLogger("client").debug("Authorization: secret")
    assert sent == []


def test_a_flood_is_cut_and_its_size_said(sent, monkeypatch):
    seconds = iter([*[5.0] * 500, 6.0])
    monkeypatch.setattr(sender.time, "monotonic", lambda: next(seconds))
    for number in range(501):
        logging.getLogger("client").warning("line %d", number)
    assert len(sent) == 51
    assert sent[-1][1].endswith("line 500 (450 lines before this one were dropped)")


def test_a_record_that_cannot_be_formatted_raises_nothing_in_the_store(sent):
    (handler,) = (handler for handler in logging.getLogger().handlers if isinstance(handler, sender._LogSender))
    handler.handle(logging.makeLogRecord({"msg": "%d", "args": ("no number",)}))
    handler.handle(logging.makeLogRecord({"msg": "fine", "levelno": logging.WARNING, "threadName": "kvtiers-cache-0"}))
    assert [text for _, text in sent] == ["cache: fine (1 lines before this one were dropped)"]
