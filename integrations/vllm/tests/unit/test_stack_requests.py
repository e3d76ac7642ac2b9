"""Whose KV a request's is, and when that cannot be known; and plans, which end when every rank has reported."""

import shutil
import time
from collections import Counter
from threading import Event, Lock
from types import SimpleNamespace

import numpy as np
import pytest

from kvtiers.types import LoadPlan, StorePlan
from kvtiers_vllm.stack.adapter_digests import AdapterDigests
from kvtiers_vllm.stack.keys import GroupKeys
from kvtiers_vllm.stack.plans import CopyReport, RunningPlans
from kvtiers_vllm.stack.requests import RequestBook, Weights

from .test_adapters import adapter

HASH = b"h" * 32
KEY = HASH + (0).to_bytes(4, "big")
GROUPS = {0: GroupKeys(0, 1, whole_prefix=True)}
PATIENCE = 60.0


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


class Versions:
    now = "default"
    emptied = 0

    def __call__(self):
        return self.now

    def resets(self):
        return self.emptied


@pytest.fixture
def versions():
    return Versions()


class Gate:
    """A question that takes until the gate is opened, and those after it wait behind it."""

    def __init__(self, digests):
        self.opened = Event()
        digests.ask(self)

    def answer(self, adapters):
        del adapters
        assert self.opened.wait(PATIENCE)


class Answered:
    """The last question of those that have been asked for."""

    def __init__(self, digests):
        self.reached = Event()
        digests.ask(self)

    def answer(self, adapters):
        del adapters
        self.reached.set()


@pytest.fixture
def digests():
    digests = AdapterDigests()
    yield digests
    digests.close()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def book(versions, digests, clock):
    return RequestBook(GROUPS, Weights("commit-1", versions, versions.resets), digests, lookup_wait=0.02, clock=clock)


def all_answered(digests):
    assert Answered(digests).reached.wait(PATIENCE)


def opened(book, request_id, lora=None, salt=None):
    request = SimpleNamespace(request_id=request_id, block_hashes=[HASH], lora_request=lora, cache_salt=salt)
    book.show(request)
    return book.open(request_id, None)


def test_a_request_that_was_not_shown_has_nothing_to_do_with_tiers(book):
    assert book.open("one", None).keys is None
    book.show(SimpleNamespace(request_id="two", block_hashes=[]))
    assert book.open("three", None).keys is None
    assert book.open("two", None).keys is None, "what was shown counts for the next name alone"


def test_a_request_has_the_keys_of_its_adapter_and_its_salt(book, digests, tmp_path):
    plain, salted = opened(book, "plain"), opened(book, "salted", salt="mine")
    adapted = opened(book, "adapted", adapter(tmp_path / "one"))
    all_answered(digests)
    assert plain.keys.of(KEY) == KEY
    assert len({request.keys.of(KEY) for request in (plain, salted, adapted)}) == 3


def test_a_request_has_no_keys_and_waits_no_longer_than_lookup_wait_until_its_adapter_was_looked_at(
    book, digests, clock, tmp_path
):
    gate = Gate(digests)
    request = opened(book, "one", adapter(tmp_path / "one"))
    assert request.keys is None
    assert book.holds_back("one")
    clock.now += 0.019
    assert book.holds_back("one")
    clock.now += 0.002
    assert not book.holds_back("one"), "it is computed"
    assert not book.holds_back("one"), "and never waits again"
    assert request.keys is None
    assert opened(book, "other").keys is not None
    gate.opened.set()


def test_a_file_system_that_hangs_costs_its_requests_the_tiers(book, digests, clock, tmp_path):
    gate = Gate(digests)
    request = opened(book, "one", adapter(tmp_path / "one"))
    assert book.stores_wait(request)
    clock.now += 5.1
    assert not book.stores_wait(request)
    gate.opened.set()
    all_answered(digests)
    assert request.keys is None, "for good"


def test_an_adapter_without_files_costs_its_requests_the_tiers(book, digests, tmp_path):
    lora = adapter(tmp_path / "one")
    lora.lora_path = "some-org/adapter-on-a-hub"
    request = opened(book, "one", lora)
    all_answered(digests)
    assert not book.holds_back("one")
    assert request.keys is None
    assert not book.stores_wait(request)


def test_an_adapter_that_changes_takes_the_requests_out_that_began_with_it(book, digests, tmp_path):
    before = opened(book, "before", adapter(tmp_path / "one", b"before"))
    other = opened(book, "other")
    all_answered(digests)
    assert before.keys is not None
    after = opened(book, "after", adapter(tmp_path / "one", b"after!", inplace=True))
    all_answered(digests)
    assert before.keys is None
    assert not book.holds_back("before")
    assert other.keys is not None
    assert after.keys is not None
    book.has_local_prefix("other", 16)
    assert other.keys is not None
    book.has_local_prefix("after", 16)
    assert after.keys is None, "part of it may be the adapter's that was"


def test_files_examined_when_vllm_may_have_loaded_others_count_for_no_request(book, digests, clock, tmp_path):
    lora = adapter(tmp_path / "one", b"before")
    gate = Gate(digests)
    early = opened(book, "early", lora)
    assert book.holds_back("early")
    clock.now += 0.021
    assert not book.holds_back("early"), "vLLM loads them now"
    adapter(tmp_path / "one", b"after!")
    later = opened(book, "later", lora)
    gate.opened.set()
    all_answered(digests)
    assert early.keys is None
    assert later.keys is None


def test_files_that_were_old_when_the_request_came_may_be_looked_at_late(versions, tmp_path):
    lora = adapter(tmp_path / "one")
    digests = AdapterDigests(clock=lambda: time.time_ns() + 3_000_000_000)
    book = RequestBook(GROUPS, Weights("commit-1", versions, versions.resets), digests, lookup_wait=0.0)
    gate = Gate(digests)
    request = opened(book, "one", lora)
    assert not book.holds_back("one")
    assert book.stores_wait(request), "what it computes may be stored later"
    gate.opened.set()
    all_answered(digests)
    assert request.keys is not None
    digests.close()


def test_an_adapter_that_is_not_there_is_looked_at_all_the_same(book, digests, tmp_path):
    lora = adapter(tmp_path / "one")
    shutil.rmtree(tmp_path / "one")
    request = opened(book, "one", lora)
    all_answered(digests)
    assert request.digesting.examined.is_set(), "a load of it would wait for files that have been examined"
    assert request.keys is None


def test_an_adapter_that_vllm_loads_without_a_request_is_known_by_what_it_was_then(book, digests, tmp_path):
    lora = adapter(tmp_path / "one", b"before")
    digests.digest_before_loading(lora)
    adapter(tmp_path / "one", b"after!")
    request = opened(book, "one", lora)
    all_answered(digests)
    assert request.keys is None, "vLLM has not loaded what the files are now"
    lora.load_inplace = True
    digests.digest_before_loading(lora)
    again = opened(book, "again", lora)
    all_answered(digests)
    assert again.keys is not None


def test_an_adapter_that_vllm_loads_without_a_request_is_looked_at_before_while_others_are_digested(
    book, digests, tmp_path
):
    lora = adapter(tmp_path / "one")
    gate = Gate(digests)
    digests.digest_before_loading(lora)
    request = opened(book, "one", lora)
    gate.opened.set()
    all_answered(digests)
    assert request.keys is not None, "its files are new, and were examined in time all the same"


def test_while_a_reloaded_adapter_is_digested_no_request_uses_the_one_before(book, digests, tmp_path):
    before = opened(book, "before", adapter(tmp_path / "one", b"before"))
    all_answered(digests)
    assert before.keys is not None
    gate = Gate(digests)
    again = opened(book, "again", adapter(tmp_path / "one", b"after!", inplace=True))
    assert before.keys is None, "vLLM may load it in the very next step"
    assert book.holds_back("before")
    gate.opened.set()
    all_answered(digests)
    assert before.keys is None
    assert not book.holds_back("before")
    assert again.keys is not None


def test_a_reloaded_adapter_that_is_the_same_keeps_the_keys_of_open_requests(book, digests, tmp_path):
    lora = adapter(tmp_path / "one", inplace=True)
    before = opened(book, "before", lora)
    all_answered(digests)
    gate = Gate(digests)
    after = opened(book, "after", lora)
    assert before.keys is None
    gate.opened.set()
    all_answered(digests)
    assert before.keys.of(KEY) == after.keys.of(KEY)


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


def test_what_vllm_has_in_its_own_cache_of_other_weights_is_stored_under_no_name(book, versions, caplog):
    book.computes()
    versions.now = "2"
    assert book.new_weights() == "commit-1@2"
    assert "reset_prefix_cache" in caplog.text
    part, none = opened(book, "part of it is in the cache"), opened(book, "none of it is")
    book.has_local_prefix("part of it is in the cache", 16)
    assert part.keys is None
    assert none.keys is not None
    versions.now = "3"
    assert book.new_weights() == "commit-1@3"
    assert len(caplog.records) == 1
    versions.emptied += 1
    assert book.new_weights() is None
    later = opened(book, "later")
    book.has_local_prefix("later", 16)
    assert later.keys is not None


@pytest.mark.parametrize("reset_first", [True, False])
def test_a_cache_that_was_emptied_with_the_update_has_nothing_of_other_weights(book, versions, reset_first, caplog):
    book.computes()
    versions.emptied += reset_first
    if reset_first:
        assert book.new_weights() is None, "as vLLM pauses"
    versions.now = "2"
    versions.emptied += not reset_first
    assert book.new_weights() == "commit-1@2"
    book.computes()
    request = opened(book, "one")
    book.has_local_prefix("one", 16)
    assert request.keys is not None
    assert not caplog.records


def test_a_cache_that_is_empty_when_the_weights_change_has_nothing_of_other_weights(book, versions):
    versions.now = "2"
    assert book.new_weights() == "commit-1@2"
    request = opened(book, "one")
    book.has_local_prefix("one", 16)
    assert request.keys is not None


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


def stored_under_an_adapter(book, digests, clock, tmp_path):
    """Return the manager, the plans, and the adapter's folder, when a store of a request with an adapter was copied."""
    manager = Manager()
    plans = RunningPlans(manager, ranks=1, clock=clock)
    request = opened(book, "one", adapter(tmp_path / "one", b"before"))
    all_answered(digests)
    assert request.keys is not None
    plans.start(StorePlan(1, [], NO_ROWS), request)
    return manager, plans, tmp_path / "one"


def test_a_store_under_an_adapter_ends_when_its_files_were_looked_at_again(book, digests, clock, tmp_path):
    manager, plans, _ = stored_under_an_adapter(book, digests, clock, tmp_path)
    gate = Gate(digests)
    plans.copies_ended(CopyReport(Counter({1: 1})))
    plans.confirm()
    assert manager.done == []
    assert plans.has_unconfirmed()
    gate.opened.set()
    all_answered(digests)
    plans.confirm()
    assert manager.done == [("store", 1, True)]
    assert not plans.has_unconfirmed()


def test_what_was_stored_while_the_adapters_files_changed_is_not_kept(book, digests, clock, tmp_path):
    manager, plans, folder = stored_under_an_adapter(book, digests, clock, tmp_path)
    (folder / "adapter_model.bin").write_bytes(b"vLLM may have loaded these")
    plans.copies_ended(CopyReport(Counter({1: 1})))
    all_answered(digests)
    plans.confirm()
    assert manager.done == [("store", 1, False)]


def test_what_was_stored_while_the_adapter_was_reloaded_is_not_kept(book, digests, clock, tmp_path):
    manager, plans, folder = stored_under_an_adapter(book, digests, clock, tmp_path)
    plans.copies_ended(CopyReport(Counter({1: 1})))
    all_answered(digests)
    opened(book, "two", adapter(folder, b"after!", inplace=True))
    plans.confirm()
    assert manager.done == [("store", 1, False)]


def test_a_store_holds_its_rows_no_longer_than_a_bound_for_a_file_system_that_hangs(book, digests, clock, tmp_path):
    manager, plans, _ = stored_under_an_adapter(book, digests, clock, tmp_path)
    gate = Gate(digests)
    plans.copies_ended(CopyReport(Counter({1: 1})))
    clock.now += 5.1
    plans.confirm()
    assert manager.done == [("store", 1, False)]
    gate.opened.set()


def test_the_keys_that_are_announced_are_those_of_the_lookup(book):
    request = SimpleNamespace(request_id="one", block_hashes=[HASH, b"i" * 32], lora_request=None, cache_salt="mine")
    ahead = book.announced(request)[0].keys
    book.show(request)
    keys = book.open("one", None).keys
    assert keys.place(KEY) == 0
    assert ahead == keys.groups()[0].keys
    assert len(ahead) == 2
    plain = SimpleNamespace(request_id="two", block_hashes=[HASH], lora_request=None, cache_salt=None)
    assert book.announced(plain) == [([KEY], 0, 0)]


def prepared(request_id, *, resumable=False, hashes=(HASH,)):
    return SimpleNamespace(
        request_id=request_id, block_hashes=list(hashes), lora_request=None, cache_salt=None, resumable=resumable
    )


def test_nothing_is_kept_of_a_session_that_has_ended(book):
    """vLLM prepares each input of a session, and one more for its end, as a request of the same id; it opens one."""
    for number in range(3):
        first = prepared(f"session {number}", resumable=True)
        assert book.announced(first) == [([KEY], 0, 0)], "its tiers are asked all the same"
        book.show(first)
        book.open(first.request_id, None)
        book.announced(prepared(first.request_id, resumable=True))
        book.announced(prepared(first.request_id, hashes=()))
        book.close(first.request_id)
    assert not book._ahead


def test_of_requests_that_are_never_opened_the_newest_are_kept(book):
    for number in range(5_000):
        book.announced(prepared(f"aborted {number}"))
    newest = prepared("newest")
    book.announced(newest)
    assert len(book._ahead) == 4_096
    assert book._ahead["newest"][0] is newest


@pytest.mark.parametrize("then", [[HASH], [HASH, b"o" * 32], [HASH, b"o" * 32, b"p" * 32], []])
def test_a_request_of_whose_blocks_one_gets_another_hash_is_out_for_good(book, then):
    shown = prepared("one", hashes=[HASH])
    book.show(shown)
    request = book.open("one", None)
    assert request.keys is not None
    shown.block_hashes.append(b"i" * 32)
    assert request.keys is not None, "a list that grows keeps what it had"
    shown.block_hashes[:] = then
    assert request.keys is None
    shown.block_hashes[:] = [HASH, b"i" * 32]
    assert request.keys is None


@pytest.mark.parametrize(
    "change",
    [
        lambda hashes: hashes.pop(),
        lambda hashes: hashes.__setitem__(1, b"o" * 32),
        lambda hashes: hashes.__setitem__(slice(1, None), [b"o" * 32, b"p" * 32]),
    ],
)
def test_a_key_that_vllm_has_kept_of_a_token_that_it_discarded_takes_the_request_out(book, change):
    """Of a list that has changed while nobody looked: vLLM's connector has its own copy, and offers that."""
    shown = prepared("one", hashes=[HASH])
    book.show(shown)
    request = book.open("one", None)
    keys = request.keys
    assert request.names(keys, [KEY])
    shown.block_hashes.append(b"i" * 32)
    kept = shown.block_hashes[1] + KEY[-4:]
    change(shown.block_hashes)
    assert not request.names(keys, [KEY, kept])
    assert request.keys is None


def test_a_request_of_which_this_release_offers_other_blocks_has_no_keys_and_is_not_announced(versions, digests):
    weights = Weights("commit-1", versions, versions.resets)
    book = RequestBook(
        GROUPS, weights, digests, lookup_wait=0.02, offloads_rightly=lambda request: not request.resumable
    )
    session, plain = prepared("session", resumable=True), prepared("plain")
    assert [book.announced(shown) for shown in (session, plain)] == [[], [([KEY], 0, 0)]]
    for shown in (session, plain):
        book.show(shown)
    assert book.open("plain", None).keys is not None
    book.show(session)
    assert book.open("session", None).keys is None


def test_what_a_session_may_have_left_in_vllms_own_cache_is_stored_for_no_other_request(versions, digests, caplog):
    """vLLM up to 0.31 offers a block that another request finds in its own prefix cache, whatever KV it has."""
    weights = Weights("commit-1", versions, versions.resets)
    book = RequestBook(GROUPS, weights, digests, lookup_wait=0.02, spoils_cache=lambda request: request.resumable)

    def opens(request_id, *, resumable=False, local=True):
        book.show(prepared(request_id, resumable=resumable))
        request = book.open(request_id, None)
        if local:
            book.has_local_prefix(request_id, 16)
        return request.keys is not None

    assert opens("before")
    opens("session", resumable=True, local=False)
    assert not opens("after")
    assert opens("computes all of it", local=False)
    opens("another session", resumable=True, local=False)
    assert len([line for line in caplog.messages if "reset_prefix_cache" in line]) == 1
    book.close("another session")
    versions.emptied += 1
    book.new_weights()
    assert not opens("while the session goes on")
    book.close("session")
    versions.emptied += 1
    book.new_weights()
    assert opens("after a reset")


def test_nothing_is_announced_for_a_request_whose_adapter_is_to_be_looked_at_first(book, tmp_path):
    request = SimpleNamespace(request_id="one", block_hashes=[HASH], lora_request=adapter(tmp_path), cache_salt=None)
    assert not book.announced(request)


def test_what_is_recorded_of_a_request_are_vllms_hashes_one_a_block_by_group(versions, digests):
    groups = {1: GroupKeys(0, 4, whole_prefix=True, hashes_per_block=2), 0: GroupKeys(1, 2, whole_prefix=False)}
    book = RequestBook(groups, Weights("w", versions, versions.resets), digests, 0.02)
    hashes = [bytes([number]) * 32 for number in range(7)]
    book.show(SimpleNamespace(request_id="r", block_hashes=hashes, cache_salt=None, lora_request=None))
    request = book.open("r", {})
    assert book.block_hashes(request) == [[hashes[1], hashes[3], hashes[5]], hashes]
    assert book.block_hashes(book.open("unseen", {})) == [[], []]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=b"}, "00-0af"),
        ({}, ""),
        (None, ""),
        ({"traceparent": 7}, ""),
    ],
)
def test_a_requests_trace_context_is_handed_over(book, headers, expected):
    shown = {"request_id": "r", "block_hashes": [HASH], "lora_request": None, "cache_salt": None}
    book.show(SimpleNamespace(**shown, trace_headers=headers))
    assert book.open("r", None).context.traceparent[:6] == expected


def test_a_release_of_vllm_without_trace_headers_has_none(book):
    assert opened(book, "r").context.traceparent == ""
