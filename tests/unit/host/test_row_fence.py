import threading

import pytest

from kvtiers.host.bounce_buffers import RowFence


@pytest.fixture
def told():
    return []


def test_rows_that_were_let_go_are_copied_into_no_more(told):
    guard, copied = RowFence(), []
    assert guard.land(lambda: copied.append(1))
    guard.detach(lambda: told.append("free"))
    assert told == ["free"]
    assert not guard.land(lambda: copied.append(2))
    assert copied == [1]


def test_a_copy_that_is_under_way_ends_before_the_rows_are_free(told):
    guard, begun, go_on = RowFence(), threading.Event(), threading.Event()

    def copy():
        begun.set()
        assert go_on.wait(60)
        told.append("copied")

    lander = threading.Thread(target=guard.land, args=(copy,))
    lander.start()
    assert begun.wait(60)
    guard.detach(lambda: told.append("free"))
    assert told == []
    go_on.set()
    lander.join(60)
    assert told == ["copied", "free"]


def test_it_is_told_once_and_not_after_the_result(told):
    guard = RowFence()
    guard.detach(lambda: told.append("free"))
    guard.detach(lambda: told.append("again"))
    over = RowFence()
    over.end()
    over.detach(lambda: told.append("late"))
    assert told == ["free"]
