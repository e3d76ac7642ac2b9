"""The boundary to plugins' code: what is raised ends there as a line of text, keeps no memory, and floods no log."""

import ctypes
import gc
import logging
import os
import re
import weakref
from collections import Counter
from pathlib import Path

import pytest

from kvtiers._failures import (
    FORKED_STATUS,
    CallThread,
    error_text,
    log_with_backoff,
    logged_boundary,
    plugin_boundary,
    same_process,
)

LOG = logging.getLogger("kvtiers.test")


class View:
    """Something that the block has in a variable."""


class BadText(Exception):  # noqa: N818
    def __str__(self):
        raise RuntimeError("no text")


def test_what_a_plugin_raises_is_a_line_of_text_and_the_code_behind_goes_on():
    with plugin_boundary() as boundary:
        raise ConnectionError("reset\nby peer")
    assert boundary.error == "ConnectionError: reset by peer"


def test_nothing_raised_is_no_error():
    with plugin_boundary() as boundary:
        pass
    assert not boundary.error


@pytest.mark.parametrize(("error", "text"), [(ValueError(), "ValueError"), (BadText(), "BadText")])
def test_an_exception_without_a_text_is_an_error_all_the_same(error, text):
    with plugin_boundary() as boundary:
        raise error
    assert boundary.error == text


def test_a_text_is_bounded():
    assert len(error_text(ValueError("x" * 100_000))) == 1_000


@pytest.mark.parametrize("leaving", [SystemExit, KeyboardInterrupt])
def test_what_ends_the_process_passes_unless_it_would_only_end_a_thread_of_ours(leaving):
    with pytest.raises(leaving), plugin_boundary():
        raise leaving
    with plugin_boundary(exits=True) as boundary:
        raise leaving
    assert boundary.error == leaving.__name__


def test_an_exception_that_is_to_pass_does():
    with pytest.raises(LookupError), plugin_boundary(LookupError):
        raise KeyError("k")


def test_what_may_be_a_bug_of_our_own_is_logged_with_its_traceback(caplog):
    with logged_boundary(logging.getLogger("kvtiers"), "%s: shutdown", "redis") as boundary:
        raise ZeroDivisionError("a bug")
    assert boundary.error == "ZeroDivisionError: a bug"
    [record] = caplog.records
    assert (record.getMessage(), record.levelname) == ("redis: shutdown", "ERROR")
    assert record.exc_info[0] is ZeroDivisionError


def test_nothing_is_logged_where_nothing_was_raised_or_what_was_goes_further(caplog):
    log = logging.getLogger("kvtiers")
    with logged_boundary(log, "broken"):
        pass
    with pytest.raises(SystemExit), logged_boundary(log, "broken"):
        raise SystemExit
    assert not caplog.records


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3)])
def test_what_a_call_on_a_thread_raises_is_there_for_the_thread_that_wants_its_result(error):
    def call():
        raise error

    errors = []
    thread = CallThread(call, errors)
    thread.start()
    thread.join()
    assert errors == [error]


def test_the_variables_of_a_block_that_failed_are_free_at_once():
    """An exception that were kept would keep the block's frame, and views of rows in it, until a collection."""

    def block():
        view = View()
        views.append(weakref.ref(view))
        with plugin_boundary() as boundary:
            raise ValueError(view)
        return boundary.error

    views = []
    gc.disable()
    try:
        assert block()
        assert views[0]() is None
    finally:
        gc.enable()


def test_what_fails_each_time_is_logged_the_first_second_fourth_and_eighth_time(caplog):
    log = logging.getLogger("test")
    for times in range(1, 16):
        log_with_backoff(times, log.warning, "%s failed (%d times so far)", "it", times)
    assert [record.getMessage() for record in caplog.records] == [
        f"it failed ({times} times so far)" for times in (1, 2, 4, 8)
    ]


def test_a_broad_except_beside_the_boundary_has_a_reason_and_no_reason_stands_all_over_the_sources():
    root, reasons, bare = Path(__file__).parents[2], Counter(), []
    for folder in ("core/src", "replay/src", "integrations/vllm/src", "plugins"):
        for path in (root / folder).rglob("*.py"):
            for line in path.read_text("utf-8").splitlines() if "tests" not in path.parts else ():
                if found := re.search(r"# noqa: BLE001(?: -- (.+))?$", line):
                    reasons[found[1]] += 1
                    bare += [f"{path.relative_to(root)}: {line.strip()}"] * (not found[1])
    assert not bare
    assert 10 < reasons.total() < 45
    assert {
        reason: count for reason, count in reasons.items() if count > 2 and reason not in {"see _do", "as above"}
    } == {}


BLOCKS = [same_process, plugin_boundary, lambda: plugin_boundary(exits=True), lambda: logged_boundary(LOG, "it")]


@pytest.mark.usefixtures("no_switch")
@pytest.mark.parametrize("fork", [os.fork, ctypes.PyDLL(None).fork], ids=["python", "c"])
@pytest.mark.parametrize("raised", [None, ValueError, SystemExit])
@pytest.mark.parametrize("block", BLOCKS)
def test_a_forked_child_goes_no_further_than_the_block_and_the_parent_does(block, raised, fork):
    with block():
        child = fork()
        if not child and raised:
            raise raised
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == FORKED_STATUS


def test_a_child_that_never_comes_back_is_left_alone_and_may_use_blocks_of_its_own():
    with same_process():
        child = os.fork()
        if not child:
            with plugin_boundary():
                pass
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
