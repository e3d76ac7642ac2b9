"""What a store's tier says of its shutdown."""

from tests.unit.secondary.store_tier.hand_backend import job, result_of, step

from kvtiers.host.messages import Opened, Status


def test_a_drain_says_how_much_was_dropped_and_still_reports_it(tier, backend, keys):
    tier.submit_store(job(1, keys))
    tier.submit_store(job(2, keys[:2]))
    tier.submit_store(job(3, keys[:1]))
    tier.submit_load(job(4, keys[:4], promotion=True))
    result_of(backend, 1, *[Status.DONE] * 4, Status.FAILED, Status.FAILED, error="the last step did not see it")
    result_of(backend, 3, Status.DONE)

    def drain(timeout):
        result_of(backend, 2, Status.FAILED, Status.FAILED, error="dropped at shutdown")
        return False

    backend.drain = drain
    assert not tier.drain(2.0)
    assert backend.logged == ["t: shutdown within 2s dropped 3 jobs with 8 chunks"]
    assert tier.stats()["dropped_shutdown"] == 8
    assert sorted(result.job_id for result in tier.get_finished_jobs()) == [1, 2, 3]


def test_a_drain_that_drops_nothing_says_nothing(tier, backend, keys):
    tier.submit_store(job(1, keys))
    result_of(backend, 1, *[Status.DONE] * 6)
    assert tier.drain(2.0)
    assert backend.logged == []


def test_results_that_take_several_polls_are_all_counted(tier, backend, keys, monkeypatch):
    tier.submit_store(job(1, keys))
    tier.submit_store(job(2, keys[:2]))

    def drain(timeout):
        result_of(backend, 1, *[Status.DONE] * 6)
        result_of(backend, 2, *[Status.DONE] * 2)
        return True

    backend.drain = drain
    all_of = backend.poll
    waiting = []

    def poll_one():
        waiting.extend(all_of())
        return [waiting.pop(0)] if waiting else []

    monkeypatch.setattr(backend, "poll", poll_one)
    assert tier.drain(2.0)
    assert backend.logged == []


def test_a_host_that_is_killed_over_dropped_jobs_is_not_called_out_of_use(tier, backend, keys):
    tier.submit_store(job(1, keys))
    tier.drop_jobs([1])
    assert backend.abandoned == [1]
    backend.say(Opened("its host ended"))
    result_of(backend, 1, *[Status.FAILED] * 6, error="its host ended")
    step(tier)
    assert backend.logged == []
    assert tier.drain(0.0)
    assert backend.logged == ["t: shutdown within 0s dropped 1 jobs with 6 chunks"]


def test_a_host_that_ends_with_no_jobs_dropped_is_called_out_of_use(tier, backend):
    tier.drop_jobs([])
    backend.say(Opened("its host ended"))
    step(tier)
    (line,) = backend.logged
    assert line.startswith("t: out of use: its host ended")
