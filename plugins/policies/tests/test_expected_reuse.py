"""What is worth a write to a tier: the decisions, and what engines over one store write by them."""

from collections import Counter, OrderedDict
from typing import ClassVar

import pytest
from tests.unit.tiering.harness import HIT, Bench, chain

from kvtiers.api.keys import make_offload_key
from kvtiers.tiering.jobs import TieringOptions
from kvtiers_policies.expected_reuse import ReuseAdmission
from kvtiers_policies.what_if import keys_only
from kvtiers_policies.what_if.keys_only import Case, CaseTier, KeysOnlyStack, ServedRequest

WIDE = TieringOptions(lookup_wait=0.02, load_wait=0.1, one_tier=1.0, all_tiers=1.0, clean_reserve=0.5)
HOUR = 3600.0


def keys(name, count):
    return [f"{name}{number}".encode() for number in range(count)]


def looked_at(admission, name="warm", count=600, odds=0.9, hits=0, now=0.0):
    """Let an admission see so many chunks that it declines."""
    admission.read(keys("hit", hits))
    return admission.choose(keys(name, count), [odds] * count, now)


# -- the decisions


def test_all_is_written_until_enough_was_looked_at():
    admission = ReuseAdmission(0.5)
    admission.read(keys("hit", 10_000))
    assert admission.choose(keys("a", 400), [0.01] * 400, 0.0) == keys("a", 400)
    assert admission.choose(keys("b", 400), [0.01] * 400, 0.0) == []


def test_what_is_least_likely_is_declined_as_long_as_the_hits_can_bear_it():
    admission = ReuseAdmission(0.01)
    looked_at(admission, hits=2_000)  # so that 20 misses may be
    first = admission.choose([*keys("unlikely", 100), *keys("likely", 100)], [0.1] * 100 + [0.5] * 100, 0.0)
    assert first == keys("likely", 100)  # 10 misses, where 60 are too many
    assert ReuseAdmission(0.0001).choose(keys("x", 1000), [0.1] * 1000, 0.0) == keys("x", 1000)


def test_less_is_declined_once_more_was_missed_than_was_expected():
    def declined(missed):
        admission = ReuseAdmission(0.01)
        looked_at(admission, hits=10_000)
        gone = keys("gone", 500)
        assert admission.choose(gone, [0.05] * 500, 0.0) == []
        admission.left(gone)
        admission.computed(gone[:missed])
        assert admission.missed == missed
        return len(keys("more", 500)) - len(admission.choose(keys("more", 500), [0.05] * 500, 0.0))

    assert declined(missed=0) == 500
    assert declined(missed=200) == 0


def test_a_miss_is_counted_once_and_not_where_a_full_tier_would_have_dropped_the_chunk():
    admission = ReuseAdmission(0.5, chunks=1000)
    looked_at(admission, hits=10_000)
    old, young = keys("old", 10), keys("young", 10)
    for gone in (old, young):
        assert admission.choose(gone, [0.001] * 10, 0.0) == []
        assert admission.left(gone) == 0
        if gone is old:
            looked_at(admission, "between", 995)
    admission.computed([*old, *young, *young])
    assert admission.missed == 10


def test_what_was_declined_is_looked_at_again_after_a_use_and_what_was_sent_is_not():
    admission = ReuseAdmission(0.5)
    looked_at(admission, hits=10_000)
    declined, sent = keys("declined", 5), keys("sent", 5)
    assert admission.choose(declined, [0.001] * 5, 0.0) == []
    admission.sent(sent, written=True)
    assert admission.looked_at.issuperset([*declined, *sent])
    admission.read([*declined[:2], *sent])
    assert admission.looked_at.isdisjoint(declined[:2])
    assert admission.looked_at.issuperset([*declined[2:], *sent])
    assert admission.unsent([*declined, *sent]) == declined
    admission.failed(sent[:1])
    assert sent[0] not in admission.looked_at
    assert admission.left([*declined, *sent]) == 3  # two used since, and one that failed


def test_a_budget_bounds_the_writes_of_each_hour_and_takes_the_likeliest():
    admission = ReuseAdmission(0.001, writes_per_hour=1000.0)
    written = Counter()
    for minute in range(120):
        now = minute * 60.0
        for odds in (0.2, 0.8):
            some = keys(f"{minute} {odds} ", 50)
            worth = admission.choose(some, [odds] * 50, now)
            admission.sent(worth, written=True)
            written[odds] += len(worth)
    assert written.total() <= 2 * 1000 + 50  # and what a budget has at its begin
    assert written[0.8] > 3 * written[0.2]


# -- in a manager


def test_what_leaves_next_is_written_ahead_of_its_eviction():
    bench = Bench(rows=8, tiers={"a": {"admission": "expected-reuse"}}, options=WIDE)
    for number in range(4):
        bench.store(chain(f"n{number}", 2))
    assert [key for job in bench.tier["a"].stores for key in job.keys]
    bench.store(chain("new", 4))
    assert bench.figures()["dropped_dirty"] == 0


def test_a_chunk_that_a_tier_has_brought_is_not_sent_back_to_it():
    bench = Bench(rows=8, tiers={"a": {"admission": "expected-reuse"}}, options=WIDE)
    document = chain("k", 4)
    bench.tier["a"].put(document)
    ctx = bench.request()
    bench.lookup(document, ctx)
    bench.settle()
    assert bench.load(document, ctx)
    bench.manager.on_request_finished(ctx)
    for number in range(6):
        bench.store(chain(f"n{number}", 2))
    assert not {key for job in bench.tier["a"].stores for key in job.keys}.intersection(document)


def test_a_store_that_fails_is_tried_again():
    bench = Bench(rows=8, tiers={"a": {"admission": "expected-reuse"}}, options=WIDE, hold=True)
    tier = bench.tier["a"]
    bench.manager.complete_store(bench.begin_store(chain("k", 8)))
    bench.step()
    first = tier.stores[0]
    tier.end(first.job_id, landed=[])
    bench.manager.complete_store(bench.begin_store(chain("new", 1)))
    for _ in range(3):
        bench.step()
    assert set(first.keys) & {key for job in tier.stores[1:] for key in job.keys}


class SharedStore(keys_only._KeyStore):
    """A store of keys that several engines share: each has answers of its own, and writes nothing that is there."""

    keys: ClassVar[OrderedDict] = OrderedDict()
    writes: ClassVar[Counter] = Counter()

    def __init__(self, capacity, quotas):
        super().__init__(capacity, quotas)
        self._keys = self.keys

    def submit_store(self, job):
        self.writes.update(key for key in job.keys if key not in self.keys)
        super().submit_store(job)


def questions(engine, count=200):
    """Requests of 12 chunks behind a system prompt of 4, none of which comes back; arrivals, keys."""
    system = [make_offload_key(f"system {number}".encode(), 0) for number in range(4)]
    for number in range(count):
        tail = [make_offload_key(f"{engine} {number} {place}".encode(), 0) for place in range(12)]
        yield ServedRequest(5.0 * number, [*system, *tail], 15, {}, 0)


@pytest.mark.parametrize("policy", ["lru", "turn-hazard"])
def test_engines_over_one_store_write_a_system_prompt_once_and_few_tails(policy, monkeypatch):
    monkeypatch.setattr(keys_only, "_KeyStore", SharedStore)
    SharedStore.keys.clear()
    SharedStore.writes.clear()
    tier = CaseTier("shared", admission="expected-reuse")
    engines = [KeysOnlyStack(Case(160, policy, (tier,))) for _ in range(3)]
    served = [list(questions(number)) for number in range(3)]
    for requests in zip(*served, strict=True):
        for engine, request in zip(engines, requests, strict=True):
            engine.serve(request)
    system = served[0][0].keys[:4]
    assert [SharedStore.writes[key] for key in system] == [1] * 4
    assert SharedStore.writes.total() < 0.6 * 3 * 200 * 12
    assert all(engine.stats()["tiers"]["shared"]["declined_cascades"] > 500 for engine in engines)


@pytest.mark.parametrize("policy", ["lru", "turn-hazard"])
def test_which_tier_a_chunk_goes_to_is_decided_by_what_each_may_lose(policy):
    """One tier may lose hardly a hit, and another one many: what the second declines is in the first, and found."""
    names = {"careful": 0.0001, "thrifty": 0.5}
    tiers = tuple(CaseTier(name, admission="expected-reuse", may_lose=share) for name, share in names.items())
    engine, requests = KeysOnlyStack(Case(160, policy, tiers)), list(questions(0))
    for request in requests:
        engine.serve(request)
    every = [key for request in requests for key in request.keys]
    held = {name: {key for key in every if engine.stores[name].lookup_many([key], None) == [HIT]} for name in names}
    assert held["thrifty"].issuperset(requests[0].keys[:4]), "the system prompt is worth a write to both"
    assert held["careful"].issuperset(requests[0].keys[:4])
    assert len(held["careful"] - held["thrifty"]) > 0.3 * 200 * 12
    hits = {name: figures["hits"] for name, figures in engine.stats()["tiers"].items()}
    alone = [request for request in requests[:150] if request.keys[4] in held["careful"] - held["thrifty"]]
    for request in alone[:20]:
        assert engine.serve(request) > 4
    found = {name: figures["hits"] - hits[name] for name, figures in engine.stats()["tiers"].items()}
    assert found["careful"] >= 20
    assert found["thrifty"] == 0
