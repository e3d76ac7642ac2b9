"""Tenants in the engine: the same prompt of two tenants is never one chunk, whatever is stored and looked up."""

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.api import make_offload_key, tenant_of
from kvtiers.layout.tenants import Tenants
from kvtiers.types import PromptGroup, RequestContext

from .harness import TOKENS, Bench, Shelf, layout_of

WORDS = ["a", "b", "c"]
served = st.lists(
    st.tuples(st.sampled_from(["", "blue", "blues"]), st.lists(st.sampled_from(WORDS), min_size=1, max_size=3)),
    min_size=1,
    max_size=10,
)


def bench_of(**rule) -> Bench:
    layout = layout_of()
    bench = Bench(layout, rows=256, tier=Shelf(layout.row_stride))
    bench.manager.tenants = Tenants("prod", **rule)
    return bench


def prompt(bench, name, tenant, words, **params):
    """A request whose every word is a chunk, and one token more, which is computed."""
    text = "".join(word * TOKENS for word in words) + "x"
    if tenant:
        params["kvtiers_tenant"] = tenant
    return bench.request(name, len(text), text=text, **params)


def common(words, others):
    """How many leading words some of the others begin with."""
    pairs = ([one == two for one, two in zip([*words, None], other, strict=False)] for other in others)
    return max(([*pair, False].index(False) for pair in pairs), default=0)


@settings(max_examples=60, deadline=None)
@given(served, st.booleans())
def test_a_request_finds_what_its_own_tenant_stored_and_nothing_else(requests, by_the_tier):
    bench = bench_of()
    before = {"": [], "blue": [], "blues": []}
    for number, (tenant, words) in enumerate(requests):
        request = prompt(bench, f"r{number}", tenant, words)
        expected = common(words, before[tenant])
        found = bench.lookup(request)
        for _ in range(4):
            if found is not None:
                break
            bench.tier.land()
            found = bench.lookup(request)
        assert found == expected * TOKENS
        bench.serve(request)
        bench.scheduler.end_step()
        before[tenant].append(words)
        if by_the_tier:
            bench.scheduler.reset_cache()
    assert {tenant_of(key) for key in bench.tier.values} == {tenant for tenant, _ in requests}
    assert {tenant_of(key) for keys in bench.manager.loaded for key in keys} <= {tenant for tenant, _ in requests}


@pytest.mark.parametrize(
    ("rule", "tenant", "line"),
    [
        ({"is_on": False}, "blue", "tenant 'blue' is named, but the config has no 'tenants'"),
        ({"allows_unknown": False, "known": ["red"]}, "blue", "tenant 'blue' is not among 'tenants.named'"),
        ({}, "Blue", "tenant 'Blue' cannot be used"),
        ({}, "b" * 58, "it has 58 characters, the namespace 4; expected at most 61"),
        ({}, 5, "kvtiers_tenant is of type int, expected a text"),
        ({"required": True}, "", "no tenant is named"),
    ],
)
def test_a_request_whose_tenant_may_not_be_runs_without_tiers(caplog, rule, tenant, line):
    caplog.set_level(logging.WARNING, "kvtiers")
    bench = bench_of(**rule)
    for number in range(3):
        request = prompt(bench, f"r{number}", tenant, ["a", "b"])
        assert bench.lookup(request) == 0
        bench.serve(request)
    assert not bench.tier.values
    assert not bench.manager.offered
    assert bench.manager.stats()["engine"]["refused_tenants"] == 3
    lines = [record.getMessage() for record in caplog.records if "runs without tiers" in record.getMessage()]
    assert len(lines) == 2, "with backoff"
    assert line in lines[0]


def test_without_tenants_keys_are_the_hash_and_the_group_alone():
    bench = bench_of(is_on=False)
    bench.serve(request := prompt(bench, "r", "", ["a", "b"]))
    assert list(bench.tier.values) == [hash_ + bytes(4) for hash_ in request.block_hashes[0]]


def test_a_key_of_another_tenant_than_the_requests_is_a_misuse():
    bench = bench_of()
    context = RequestContext("r", {"kvtiers_tenant": "blue"})
    bench.manager.on_new_request(context)
    for key in (make_offload_key(b"hash", 0), make_offload_key(b"hash", 0, "red"), b"x"):
        assert bench.manager.prepare_store([key], context) is None
        assert bench.manager.reach([PromptGroup([key])], context)[:3] == (0, 0, False)
    assert bench.manager.stats()["engine"]["misuse"] == 6
    assert bench.manager.prepare_store([make_offload_key(b"hash", 0, "blue")], context) is not None


@pytest.mark.parametrize("tenant", [None, 0, False, [], {}, 5, ["blue"]])
def test_what_is_no_text_is_never_taken_for_no_tenant(tenant):
    tenants = Tenants("prod")
    assert tenants.of({"kvtiers_tenant": tenant}) is None
    assert tenants.refused == 1
    assert tenants.of({"kvtiers_tenant": ""}) == tenants.of({}) == ""


@pytest.mark.parametrize(
    ("params", "salt", "tenant"),
    [
        ({}, "blue:secret", "blue"),
        ({}, "blue", ""),
        ({}, ":secret", ""),
        ({}, "", ""),
        ({"kvtiers_tenant": "blue"}, "blue:secret", "blue"),
        ({"kvtiers_tenant": "blue"}, "secret", "blue"),
        ({"kvtiers_tenant": "red"}, "blue:secret", None),
        ({}, "Blue:secret", None),
    ],
)
def test_the_owner_of_a_salt(params, salt, tenant):
    assert Tenants("prod", salt_separator=":").of(params, salt) == tenant
    assert Tenants("prod").of(params, salt) == params.get("kvtiers_tenant", ""), (
        "without a separator a salt says nothing"
    )
