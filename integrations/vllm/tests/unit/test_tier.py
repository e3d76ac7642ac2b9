"""The class that vLLM calls for a tier: whatever goes wrong in a call, vLLM gets an answer that does no harm."""

import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from kvtiers.api import ConfigError
from kvtiers.tiering.tier_slot import TierOptions, TierSlot
from kvtiers_vllm.engine import Engine, being_built
from kvtiers_vllm.own_tiering.build import OffTier, OpenedTier
from kvtiers_vllm.own_tiering.job_ledger import JobLedger
from kvtiers_vllm.own_tiering.options import TierSettings
from kvtiers_vllm.own_tiering.tier_driver import TierDriver

from . import fake_vllm

KEY = bytes(36)


class Config(SimpleNamespace):
    """vLLM's config of an engine."""


class Request(SimpleNamespace):
    """vLLM's, of which there may be weak references."""


@pytest.fixture
def version():
    return "0.32.0"


@pytest.fixture
def config():
    return Config()


class Status:
    """A socket that never answers."""

    def close(self):
        pass


@pytest.fixture
def drivers():
    """Those of the tiers that ``make`` has made."""
    return []


@pytest.fixture
def make(monkeypatch, version, config, drivers):
    """Return a function that makes a tier of an engine that is off, with a driver of its own and this end."""
    module = fake_vllm.load(monkeypatch, "own_tiering.tier", version)
    monkeypatch.setattr(module, "load_tier_options", lambda *_: (SimpleNamespace(tier_name="near"), TierSettings()))
    monkeypatch.setattr(module, "open_status", lambda *_: Status())

    def make(spec, close=lambda _: None, **options):
        driver = TierDriver(TierSlot(0, OffTier(), TierOptions("near")), 0.02, close)
        drivers.append(driver)
        opened = OpenedTier(driver, "near", "model", shared=True)
        monkeypatch.setattr(module, "open_tier", lambda *_: opened)
        with being_built(Engine(config, None)):
            return module.KvtiersTier(spec, memoryview(bytes(8)), "kvtiers-near", **options)

    return make


def offloading_spec():
    return SimpleNamespace(extra_config={}, config=SimpleNamespace(groups=()))


@pytest.fixture
def tier(make):
    return make(offloading_spec())


def test_the_locality_is_one_of_vllms_or_one_line_that_names_the_option(make):
    assert make(offloading_spec(), locality="REMOTE").locality.value == "REMOTE"
    with pytest.raises(
        ValueError, match="kvtiers-near: locality: 'near' is no Locality of vLLM's; expected 'LOCAL' or 'REMOTE'"
    ):
        make(offloading_spec(), locality="near")


def job(job_id=7, chunk_ids=(3,)):
    rows = np.array(chunk_ids) if chunk_ids is not None else None
    return SimpleNamespace(job_id=job_id, keys=[KEY], chunk_ids=rows, req_context=SimpleNamespace(req_id="a"))


def ended(tier):
    return [(result.job_id, result.success) for result in tier.get_finished_jobs()]


@pytest.mark.parametrize("call", ["submit_store", "submit_load"])
def test_a_job_that_cannot_be_handed_over_has_failed_once(tier, call, caplog):
    getattr(tier, call)(job(chunk_ids=None))
    assert f"{call} failed (1 times so far)" in caplog.text
    assert ended(tier) == [(7, False)], "vLLM's request and its rows wait for it"
    assert ended(tier) == []


@pytest.mark.parametrize("call", ["submit_store", "submit_load"])
def test_a_job_that_fails_while_it_is_handed_over_has_failed_once(tier, call, monkeypatch):
    def fail(*_arguments):
        raise ZeroDivisionError

    monkeypatch.setattr(JobLedger, "extent", fail)
    getattr(tier, call)(job())
    assert ended(tier) == [(7, False)]
    assert ended(tier) == []
    tier.drain_jobs()


@pytest.mark.parametrize(("said", "taken"), [({"get_offload_key_position": {KEY: 96}.get}, 96), ({}, None)])
def test_a_job_is_handed_over_with_the_positions_of_its_chunks_where_vllm_says_them(tier, monkeypatch, said, taken):
    ends = []
    monkeypatch.setattr(TierDriver, "submit", lambda *_job, **more: ends.append(more["ends"](KEY)))
    given = job()
    given.req_context = SimpleNamespace(req_id="a", **said)
    tier.submit_load(given)
    tier.submit_store(given)
    assert ends == [taken, taken]


def test_a_job_that_was_handed_over_has_the_result_that_it_gets_there(tier, drivers, monkeypatch):
    submit = TierDriver.submit

    def submit_and_fail(*arguments, **more):
        submit(*arguments, **more)
        raise ZeroDivisionError

    monkeypatch.setattr(TierDriver, "submit", submit_and_fail)
    monkeypatch.setattr(TierSlot, "available", lambda _slot: True)
    monkeypatch.setattr(TierSlot, "submit", lambda _slot, _job: True)
    tier.submit_store(job())
    assert ended(tier) == [], "its rows may be in use"
    assert drivers[0].has_jobs()


@pytest.mark.parametrize(
    ("version", "salt", "left_out"),
    [
        ("0.28.0", "mine", True),
        ("0.30.0", "mine", True),
        ("0.30.0", None, False),
        ("0.32.0", "mine", False),
    ],
)
def test_a_salted_request_is_left_out_where_its_salt_is_hashed_without_a_tag(
    tier, drivers, config, salt, left_out, monkeypatch
):
    from vllm.v1.engine.core import EngineCore

    monkeypatch.setattr(TierSlot, "available", lambda _slot: True)
    monkeypatch.setattr(TierSlot, "ask", lambda _slot, _keys, _context: (1, False))
    arrived, _ = EngineCore(config).preprocess_add_request(Request(request_id="a", cache_salt=salt, block_hashes=[]))
    request = SimpleNamespace(req_id="a", kv_transfer_params=None)
    tier.on_new_request(request)
    del arrived  # the engine may have forgotten it before its last store
    assert tier.lookup(KEY, request).name == ("MISS" if left_out else "HIT")
    assert drivers[0].left_out_requests == left_out
    tier.on_request_finished(request)
    assert tier.lookup(KEY, request).name == "HIT"


@pytest.mark.parametrize(
    ("version", "left_out"),
    [("0.28.0", True), ("0.29.0", True), ("0.30.0", True), ("0.31.0", True), ("0.32.0", True), ("0.33.0", False)],
)
def test_a_session_is_left_out_where_vllm_offers_other_blocks_of_it_than_it_has_hashed(
    tier, drivers, config, left_out, monkeypatch
):
    from vllm.v1.engine.core import EngineCore

    monkeypatch.setattr(TierSlot, "available", lambda _slot: True)
    monkeypatch.setattr(TierSlot, "ask", lambda _slot, _keys, _context: (1, False))
    given = {"request_id": "a", "cache_salt": None, "block_hashes": [], "resumable": True}
    first, _ = EngineCore(config).preprocess_add_request(Request(**given))
    request = SimpleNamespace(req_id="a", kv_transfer_params=None)
    tier.on_new_request(request)
    EngineCore(config).preprocess_add_request(Request(**given))  # the second input, which vLLM does not announce
    del first
    assert tier.lookup(KEY, request).name == ("MISS" if left_out else "HIT")
    assert drivers[0].left_out_requests == left_out
    tier.on_request_finished(request)
    assert not tier._driver._prompts._expected, "nothing is kept of a session that has ended"


@pytest.mark.parametrize(
    ("version", "stores"),
    [("0.30.0", False), ("0.31.0", False), ("0.32.0", True), ("0.33.0", True)],
)
def test_nothing_is_stored_once_a_session_may_have_left_other_kv_in_vllms_own_cache(
    tier, config, stores, monkeypatch, caplog
):
    from vllm.v1.engine.core import EngineCore

    given = []
    monkeypatch.setattr(TierDriver, "submit", lambda _driver, job_id, *_job, **_more: given.append(job_id))
    for request_id in ("a", "b"):
        request = Request(request_id=request_id, cache_salt=None, block_hashes=[], resumable=request_id == "b")
        tier.submit_store(job(job_id=len(given)))
        EngineCore(config).preprocess_add_request(request)
        EngineCore(config).preprocess_add_request(request)
    tier.submit_store(job(job_id=7))
    tier.submit_load(job(job_id=8))
    assert given == [0, 1, 7, 8] if stores else [0, 1, 8]
    assert ended(tier) == ([] if stores else [(7, True)])
    assert caplog.text.count("this engine stores nothing more") == (not stores)


@pytest.mark.parametrize(("version", "refused"), [("0.28.0", True), ("0.29.0", True), ("0.30.0", False)])
def test_answers_are_refused_where_vllm_stores_a_token_of_them_that_it_has_not_computed(make, refused, caplog):
    spec = offloading_spec()
    spec.extra_config = {"offload_prompt_only": False}
    if refused:
        with pytest.raises(ConfigError, match="offload_prompt_only: false: vLLM 0"):
            make(spec)
        assert caplog.text.count("kvtiers: offload_prompt_only: false") == 1, "before vLLM's traceback"
    else:
        make(spec)


def test_the_tiers_of_an_engine_end_at_the_same_time_and_those_of_another_go_on(make):
    both, spec, ended = threading.Barrier(2), offloading_spec(), []

    def end(name):
        both.wait(60)  # breaks where one ends after the other
        ended.append(name)

    tiers = [make(spec, lambda _: end("one")), make(spec, lambda _: end("two"))]
    other = make(offloading_spec(), lambda _: ended.append("other"))
    for tier in tiers:
        tier.shutdown()
    assert sorted(ended) == ["one", "two"]
    other.shutdown()
    other.shutdown()
    assert sorted(ended) == ["one", "other", "two"]


def test_an_end_that_takes_its_time_is_waited_for_by_its_own_tier(make):
    """vLLM takes its memory back after the last one."""
    spec, may_end, ended = offloading_spec(), threading.Event(), []

    def end_late(_seconds):
        assert may_end.wait(60)
        ended.append("late")

    quick, late = make(spec), make(spec, end_late)
    quick.shutdown()
    assert not ended
    may_end.set()
    late.shutdown()
    assert ended == ["late"]


def test_tiers_end_also_where_no_thread_can_be_started(make, monkeypatch, caplog):
    """As while the interpreter ends, which is when an engine in a program's own process may have to end."""

    def no_thread(_thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    spec, ended = offloading_spec(), []
    tiers = [make(spec, lambda _: ended.append("one")), make(spec, lambda _: ended.append("two"))]
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    for tier in tiers:
        tier.shutdown()
    assert sorted(ended) == ["one", "two"]
    assert not caplog.records


def test_an_end_that_fails_ends_no_engine(make, caplog):
    def fail(_seconds):
        raise ZeroDivisionError

    make(offloading_spec(), fail).shutdown()
    assert "a bug of kvtiers" in caplog.text


def test_the_tiers_of_an_engine_have_one_start_line(make, monkeypatch):
    begun = []
    line = SimpleNamespace(closed=0)
    line.close = lambda: setattr(line, "closed", line.closed + 1)
    spec = offloading_spec()
    spec.extra_config = {"secondary_tiers": [{"type": "kvtiers-near"}, {"type": "vllms-own"}, {"type": "kvtiers-far"}]}
    other = make(offloading_spec())
    module = sys.modules[type(other).__module__]
    monkeypatch.setattr(module, "begin_start_line", lambda tiers: begun.append(list(tiers)) or line)
    first = make(spec)
    assert not begun, "there is one to come"
    second = make(spec)
    assert [set(map(id, tiers)) for tiers in begun] == [{id(first.opened), id(second.opened)}]
    first.shutdown()
    assert line.closed == 1, "before a tier is closed"
    other.shutdown()
    assert line.closed == 1
