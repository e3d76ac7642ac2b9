import logging

import pytest

from kvtiers.host import sender
from kvtiers.host.messages import SAY_ONCE
from kvtiers.host.sender import send_logs


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
