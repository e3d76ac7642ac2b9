"""Nothing raises into vLLM's step, whatever goes wrong in a call of ours."""

import pytest

from kvtiers_vllm.never_raise import BugCount, never_raises


class Manager:
    def __init__(self):
        self.bugs = BugCount("fs")

    @never_raises(lambda: "nothing")
    def answer(self, error=None):
        """Answer."""
        if error is not None:
            raise error
        return "something"


@pytest.mark.parametrize("error", [ValueError("a bug"), AssertionError(), OSError(5, "world"), RecursionError()])
def test_what_would_be_raised_is_answered_by_what_does_no_harm(error):
    manager = Manager()
    assert manager.answer() == "something"
    assert manager.answer(error) == "nothing"
    assert manager.answer() == "something"


def test_a_bug_is_logged_with_its_place_and_its_stack_and_less_and_less_often(caplog):
    manager = Manager()
    for _ in range(9):
        manager.answer(ValueError("a bug"))
    assert [record.getMessage() for record in caplog.records] == [
        f"fs: answer failed ({count} times so far); a bug of kvtiers" for count in (1, 2, 4, 8)
    ]
    assert "a bug" in caplog.text


def test_an_end_of_the_process_is_not_held_up():
    with pytest.raises(KeyboardInterrupt):
        Manager().answer(KeyboardInterrupt())
