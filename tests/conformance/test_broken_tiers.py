"""A promise that a tier of the third rung breaks is named by the kit's test for it."""

import re
import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1800)  # thousands of tests of the kit, in the first one's setup

FILE = Path(__file__).parent / "broken" / "broken_tiers.py"
QUOTA_TESTS = {
    "test_a_tenant_at_its_quota_loses_its_oldest_chunks_and_no_other_loses_one",
    "test_a_store_larger_than_the_quota_keeps_what_has_room_and_declines_the_rest",
    "test_chunks_of_a_tenant_with_a_quota_come_back_as_they_were_stored",
}
CAUGHT_BY = runpy.run_path(str(FILE))["CAUGHT_BY"]


@pytest.fixture(scope="module")
def report(run_kit):
    return run_kit(FILE)


@pytest.mark.parametrize("tier", CAUGHT_BY)
def test_a_broken_tier_is_caught_by_the_test_that_names_the_promise(report, assert_caught, tier):
    assert_caught(report, tier, *CAUGHT_BY[tier])


def test_every_test_of_the_kit_catches_some_tier(report):
    every = {test for name in CAUGHT_BY for tests in report.tests[f"Test{name}"].values() for test in tests}
    assert every == {test for must, _ in CAUGHT_BY.values() for test in must}


def test_only_a_tier_that_can_be_held_or_keeps_quotas_is_tested_for_it(report):
    simple = set().union(*report.tests["TestHealthySimple"].values())
    held = set().union(*report.tests["TestHealthyAsync"].values())
    assert held - simple == {"test_submit_returns_while_the_backend_is_held", *QUOTA_TESTS}
    assert simple <= held


@pytest.mark.parametrize(
    ("tier", "method", "said", "stands_in"),
    [
        ("SleepsInItsLookup", "lookup", r"(sleeps \(time.sleep|waits: [3-9])", "time.sleep(0.003)"),
        ("ReadsAFileInItsPoll", "get_finished_jobs", r"opens a file \(open\('.*broken_tiers", "with open(__file__"),
        ("AsksAServerInItsLookup", "lookup", r"waits: \d+\.\d ms and more in each of 24 calls", "self.client.recv(1)"),
        ("WaitsForItsLoopInTheSubmit", "submit_load", r"waits: \d+\.\d ms and more in each of 24 calls", ".result()"),
    ],
)
def test_what_waits_on_the_engine_s_thread_is_named_with_the_place_where_it_does(report, tier, method, said, stands_in):
    message = report.messages[f"Test{tier}", "test_no_call_on_the_engine_s_thread_sleeps_or_waits"]
    assert re.search(rf"{tier}\.{method} {said}", message), message
    assert "on the engine's thread, in every step, where nothing may wait" in message
    assert stands_in in message


@pytest.mark.parametrize(
    ("test", "said"),
    [
        ("test_many_jobs_in_flight_yield_one_result_each", "7 of 8 stores in flight at the same time failed"),
        ("test_submit_returns_while_the_backend_is_held", "a load in flight beside a store failed"),
    ],
)
def test_a_tier_of_one_job_at_a_time_fails_by_its_jobs_and_not_by_wrong_bytes(report, test, said):
    message = report.messages["TestMovesOneJobAtATime", test]
    assert said in message
    assert "bytes are wrong" not in message
