"""Whose KV a request's is, and when nobody can tell; and plans, which end when every rank has reported."""

from collections import Counter
from threading import Lock
from types import SimpleNamespace

import numpy as np
import pytest

from kvtiers.base import LoadPlan, StorePlan
from kvtiers.integrations.vllm.stack.keys import GroupKeys
from kvtiers.integrations.vllm.stack.plans import CopyReport, RunningPlans
from kvtiers.integrations.vllm.stack.requests import RequestBook, Weights

from .test_adapters import adapter

HASH = b"h" * 32
KEY = HASH + (0).to_bytes(4, "big")


class Versions:
    now = "default"

    def __call__(self):
        return self.now


@pytest.fixture
def versions():
    return Versions()


@pytest.fixture
def book(versions):
    return RequestBook({0: GroupKeys(0, 1, whole_prefix=True)}, Weights("commit-1", versions))


def opened(book, request_id, lora=None, salt=None):
    request = SimpleNamespace(request_id=request_id, block_hashes=[HASH], lora_request=lora, cache_salt=salt)
    book.show(request)
    return book.open(request_id, None)


def test_a_request_that_was_not_shown_has_nothing_to_do_with_tiers(book):
    assert book.open("one", None).keys is None
    book.show(SimpleNamespace(request_id="two", block_hashes=[]))
    assert book.open("three", None).keys is None
    assert book.open("two", None).keys is None, "what was shown counts for the next name alone"


def test_a_request_has_the_keys_of_its_adapter_and_its_salt(book, tmp_path):
    plain, salted = opened(book, "plain"), opened(book, "salted", salt="mine")
    adapted = opened(book, "adapted", adapter(tmp_path / "one"))
    assert plain.keys.of(KEY) == KEY
    assert len({request.keys.of(KEY) for request in (plain, salted, adapted)}) == 3


def test_an_adapter_that_changes_takes_the_requests_out_that_began_with_it(book, tmp_path):
    before = opened(book, "before", adapter(tmp_path / "one", b"before"))
    other = opened(book, "other")
    after = opened(book, "after", adapter(tmp_path / "one", b"after!", inplace=True))
    assert before.keys is None
    assert other.keys is not None
    assert after.keys is not None
    book.has_local_prefix("other")
    assert other.keys is not None
    book.has_local_prefix("after")
    assert after.keys is None, "part of it may be the adapter's that was"


def test_other_weights_have_another_name_and_take_all_open_requests_out(book, versions):
    before = opened(book, "before")
    assert book.new_weights() is None
    versions.now = "2"
    assert book.new_weights() == "commit-1@2"
    assert book.new_weights() is None
    assert before.keys is None
    assert opened(book, "after").keys is not None
    assert book.close("before") is before
    assert book.get("before") is None


class Manager:
    """Notes what is completed."""

    def __init__(self):
        self.lock = Lock()
        self.done = []

    def complete_store(self, plan, *, success):
        self.done.append(("store", plan.plan_id, success))

    def complete_load(self, plan, *, success):
        self.done.append(("load", plan.plan_id, success))


NO_ROWS = np.empty(0, np.int32)


def test_a_plan_ends_when_the_last_rank_has_reported_and_fails_if_one_did(book):
    manager = Manager()
    plans = RunningPlans(manager, ranks=2)
    storing, loading = opened(book, "storing"), opened(book, "loading")
    plans.start(StorePlan(1, [], NO_ROWS), storing)
    plans.start(LoadPlan(2, [], NO_ROWS), loading)
    plans.copies_ended(CopyReport(Counter({1: 1, 2: 1}), {2}))
    assert manager.done == []
    plans.copies_ended(CopyReport(Counter({1: 1})))
    assert manager.done == [("store", 1, True)]
    plans.copies_ended(CopyReport(Counter({2: 1})))
    assert manager.done[1:] == [("load", 2, False)]
    assert loading.load_failed
    assert not storing.load_failed
    plans.copies_ended(CopyReport(Counter({1: 1, 7: 2})))
    assert len(manager.done) == 2, "a plan ends once, and what is none ends nothing"


def test_reports_of_ranks_add_up():
    report = CopyReport(Counter({1: 1}), {1})
    report.add(CopyReport(Counter({1: 1, 2: 1}), {2}))
    assert (report.ended, report.failed) == (Counter({1: 2, 2: 1}), {1, 2})
