"""A promise that a store breaks is named by the kit's test for it, and by no other."""

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1800)  # thousands of tests of the kit, in the first one's setup

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).parent / "broken" / "broken_stores.py"
CAUGHT_BY = runpy.run_path(str(FILE))["CAUGHT_BY"]


@pytest.fixture(scope="module")
def report(run_kit):
    return run_kit(FILE, path=[ROOT])


@pytest.mark.parametrize("store", CAUGHT_BY)
def test_a_broken_store_is_caught_by_the_test_that_names_the_promise(report, assert_caught, store):
    assert_caught(report, store, *CAUGHT_BY[store])


def test_every_test_of_the_kit_catches_some_store(report):
    every = {test for name in CAUGHT_BY for tests in report.tests[f"Test{name}"].values() for test in tests}
    assert every == {test for must, _ in CAUGHT_BY.values() for test in must}


@pytest.mark.parametrize(
    ("store", "kept"),
    [
        ("KeepsAViewOfTheSource", "write"),
        ("KeepsASliceOfTheSource", "write"),
        ("KeepsAnArrayOfTheSource", "write"),
        ("KeepsTheDestination", "read_into"),
        ("KeepsAnArrayOfAMissedDestination", "read_into"),
    ],
)
def test_the_message_names_the_class_that_kept_a_buffer(report, store, kept):
    what = "read" if kept == "read_into" else kept
    message = report.messages[f"Test{store}", f"test_no_buffer_is_kept_after_a_{what}"]
    assert f"{store} kept the buffer that {kept} was given" in message


@pytest.mark.parametrize(
    ("store", "said"),
    [
        ("HasHalfAnAbility", "HasHalfAnAbility has read_many_into but not batch_values, write_many: SupportsBatch"),
        ("MisspellsAnAbility", "'diagnoze', which is no part of the contract and is never used. Did you mean"),
        ("MisspellsAnAttribute", "Did you mean 'asks_one_by_one'?"),
    ],
)  # fmt: skip
def test_what_looks_like_part_of_the_contract_is_named_with_a_suggestion(report, store, said):
    whole = "test_every_public_method_is_the_contract_s_and_every_ability_is_whole"
    assert said in report.messages[f"Test{store}", whole]


def test_only_a_store_whose_backend_can_be_broken_is_tested_for_it(report):
    [of_failures] = set().union(*report.tests["TestHealthyRemote"].values()) - set().union(
        *report.tests["TestHealthyEveryAbility"].values()
    )
    assert "backend_that_fails" in of_failures
    message = report.messages["TestSwallowsErrorsOfReads", of_failures]
    assert "SwallowsErrorsOfReads: read_into returned 0; read_many_into returned [0]" in message
    assert (
        "SwallowsErrorsOfWrites: write returned None; write_many returned [None]"
        in report.messages["TestSwallowsErrorsOfWrites", of_failures]
    )


def test_tests_of_abilities_that_a_store_lacks_are_not_collected(report):
    with_none = set().union(*report.tests["TestHealthyMemory"].values())
    with_all = set().union(*report.tests["TestHealthyEveryAbility"].values())
    assert with_none < with_all
    for word in ("batch", "pieces", "listing", "diagnosis", "stats"):
        assert any(word in test for test in with_all)
        assert not any(word in test for test in with_none)


def test_persistence_decides_which_tests_of_reopening_there_are(report):
    volatile = set().union(*report.tests["TestHealthyMemory"].values())
    persistent = set().union(*report.tests["TestHealthyFolder"].values())
    assert volatile - persistent == {"test_a_reopened_store_starts_empty"}
    assert persistent - volatile == {
        "test_values_survive_a_reopen",
        "test_a_writer_killed_in_the_middle_leaves_no_half_value",
        "test_a_killed_writer_does_not_hinder_the_next_one",
    }


def test_for_a_store_that_cannot_be_opened_in_another_process_the_message_says_how(report):
    message = report.messages["TestCannotBeOpenedElsewhere", "test_a_writer_killed_in_the_middle_leaves_no_half_value"]
    assert "functools.partial" in message
