"""The pool of these tests: where a part of it does not start, no process is left."""

import subprocess

import pytest
from mooncake_pool import Master, shared_pool


@pytest.fixture
def started(client_library, monkeypatch):
    """Return the processes that the test starts."""
    start, processes = subprocess.Popen, []

    def recorded(*arguments, **options):
        processes.append(start(*arguments, **options))
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", recorded)
    return processes


def test_a_master_whose_segment_owner_does_not_start_is_ended(tmp_path, started):
    with pytest.raises(AssertionError, match="did not start"), shared_pool(tmp_path, segment=-1):
        pass
    assert [process.returncode is not None for process in started] == [True, True]


def test_a_master_that_does_not_answer_is_ended(tmp_path, started, monkeypatch):
    def fails(_master):
        raise AssertionError("it does not answer")

    monkeypatch.setattr(Master, "_answers", fails)
    with pytest.raises(AssertionError, match="does not answer"):
        Master(tmp_path).start()
    assert [process.returncode is not None for process in started] == [True]
