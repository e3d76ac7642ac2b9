"""Tiers of the third rung under core's protection: when they are in use."""

import pytest
from tests.unit.secondary.async_tier import AsyncTier, finish, job

from kvtiers.api import JobResult


def test_failures_open_the_breaker_and_the_next_job_is_the_probe(kit, sealed, keys, clock):
    tier, inner = sealed()
    for _ in range(2):
        tier.submit_load(job(keys, promotion=True))
        inner.waiting.clear()
        inner.results.append(JobResult(next(reversed(tier._jobs)), success=False))
        finish(kit, tier)
    assert not tier.is_available()
    clock.now += 1
    tier.on_schedule_end()
    assert tier.is_available()
    inner.values = {kit.NAMES.layout_id + key: bytes(kit.VALUE) for key in keys}
    tier.submit_load(job(keys, promotion=True))
    assert not tier.is_available(), "one probe, and nothing beside it"
    inner.move()
    finish(kit, tier)
    assert tier.is_available()


def test_a_probe_that_ends_too_late_leaves_the_tier_out_of_use(kit, sealed, keys, clock):
    tier, inner = sealed()
    for _ in range(2):
        tier.submit_load(job(keys, promotion=True))
        inner.results.append(JobResult(inner.waiting.pop().job_id, success=False))
        finish(kit, tier)
    clock.now += 1
    tier.on_schedule_end()
    inner.values = {kit.NAMES.layout_id + key: bytes(kit.VALUE) for key in keys}
    probe = job(keys, promotion=True)
    tier.submit_load(probe)
    tier.abandon_job(probe.job_id)
    inner.move()
    finish(kit, tier)
    assert not tier.is_available()


def test_an_overdue_job_counts_once_against_the_tier_whatever_comes_of_it_later(kit, sealed, keys):
    tier, inner = sealed()
    late = job(keys, promotion=True)
    tier.submit_load(late)
    tier.abandon_job(late.job_id)
    inner.results.append(JobResult(inner.waiting.pop().job_id, success=False))
    finish(kit, tier)
    assert tier.is_available(), "one failure of the two that open the breaker"
    late = job(keys, promotion=True)
    tier.submit_load(late)
    tier.abandon_job(late.job_id)
    assert not tier.is_available()


def test_a_probe_that_the_tier_refuses_does_not_leave_it_out_of_use_for_ever(kit, sealed, keys, clock):
    tier, inner = sealed()
    inner.refuse = True
    for _ in range(3):
        with pytest.raises(OSError, match="no"):
            tier.submit_load(job(keys, promotion=True))
        clock.now += 1
        tier.on_schedule_end()
    clock.now += 100
    tier.on_schedule_end()
    assert tier.is_available()


def test_a_tier_that_cannot_be_opened_is_tried_again(kit, sealed, log_lines):
    tries = []

    def opener():
        tries.append(1)
        if len(tries) < 4:
            raise ConnectionRefusedError("refused")
        return AsyncTier(kit.rows, kit.VALUE)

    tier, _ = sealed(opener)
    assert "refused" in tier.wait_open(kit.PATIENCE) or len(tries) > 3
    assert "t: out of use: ConnectionRefusedError: refused" in log_lines("out of use")
    kit.wait_until(tier.is_available, "its opening")
    assert tier.wait_open(0) == ""
