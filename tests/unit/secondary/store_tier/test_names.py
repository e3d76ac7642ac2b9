"""A store's tier after it was given other names."""

import pytest
from tests.unit.secondary.store_tier.hand_backend import HIT, RETRY, job, lookup, result_of, step

from kvtiers.host.messages import JobFailed, Status


def test_after_new_names_nothing_old_is_believed_and_old_jobs_teach_nothing(tier, backend, kit, keys):
    tier.submit_store(job(1, keys[:3]))
    tier.submit_load(job(2, keys[3:], promotion=True))
    tier.submit_store(job(3, keys[:1]))
    result_of(backend, 3, Status.DONE)
    step(tier)
    tier.set_names(kit.NAMES)
    assert backend.names is kit.NAMES
    result_of(backend, 1, *[Status.DONE] * 3)
    result_of(backend, 2, *[Status.MISSING] * 3)
    finished, _ = step(tier)
    assert sorted(result.job_id for result in finished) == [1, 2]
    assert lookup(tier, keys[:1]) == [RETRY]
    assert lookup(tier, keys[3:]) == [RETRY]


@pytest.mark.parametrize("who", ["engine", "backend"])
def test_a_load_of_old_names_that_fails_says_nothing_of_the_new(tier, backend, kit, keys, who):
    tier.submit_load(job(1, keys, promotion=True))
    tier.set_names(kit.NAMES)
    tier.submit_store(job(2, keys))
    result_of(backend, 2, *[Status.DONE] * 6)
    step(tier)
    if who == "engine":
        tier.abandon_job(1)
    else:
        backend.say(JobFailed(1, "ListStore kept the buffer"))
        step(tier)
    assert lookup(tier, keys) == [HIT] * 6
