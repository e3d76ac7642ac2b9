"""A store whose forked child comes back from a call is one error of the kit, which names the call."""

from pathlib import Path

FILE = Path(__file__).parent / "broken" / "forking_store.py"


def test_a_store_whose_forked_child_comes_back_is_one_error_and_no_test_runs_twice(run_kit):
    report = run_kit(FILE)
    outcomes = report.tests["TestForks"]
    assert not outcomes["passed"]
    [first] = outcomes["failed"]
    assert outcomes["skipped"]
    assert "Forks.write forked, and its child (" in report.messages["TestForks", first]
    assert report.output.count(" skipped, ") == 1, "the run ends once"
