"""Tenants in both ways into vLLM: whose a request's chunks are, and that no call of vLLM's ever names another's."""

from types import SimpleNamespace

import numpy as np
import pytest

from kvtiers.api import ConfigError, JobResult, make_offload_key, tenant_of
from kvtiers.config import load_config
from kvtiers.layout.tenants import Tenants
from kvtiers.tiering.tier_slot import TierOptions, TierSlot
from kvtiers_vllm.cli import transfer_config
from kvtiers_vllm.engine import Engine, being_built
from kvtiers_vllm.own_tiering.build import OffTier, OpenedTier
from kvtiers_vllm.own_tiering.options import TierSettings, load_tier_options
from kvtiers_vllm.own_tiering.tier_driver import TierDriver
from kvtiers_vllm.stack.adapter_digests import AdapterDigests
from kvtiers_vllm.stack.keys import GroupKeys, RequestKeys
from kvtiers_vllm.stack.requests import RequestBook, Weights

from . import fake_vllm

HASH = b"h" * 32
KEY = HASH + bytes(4)
GROUPS = {0: GroupKeys(0, 1, whole_prefix=True)}
WRITTEN = {
    "in the field": lambda tenant: {"kvtiers": {"tenant": tenant}},
    "beside it": lambda tenant: {"kvtiers_tenant": tenant},
}


@pytest.fixture(params=WRITTEN, autouse=True)
def written(request, monkeypatch):
    """Have requests name their tenant in either way."""
    monkeypatch.setitem(WRITTEN, "now", WRITTEN[request.param])


def params_of(tenant):
    return None if tenant is None else WRITTEN["now"](tenant)


# -- the whole stack


@pytest.fixture
def book():
    digests = AdapterDigests()
    weights = Weights("commit-1", lambda: "default", lambda: 0)
    yield RequestBook(GROUPS, weights, digests, lookup_wait=0.02, tenants=Tenants("prod", salt_separator=":"))
    digests.close()


def shown(request_id, tenant=None, salt=None):
    return SimpleNamespace(
        request_id=request_id,
        block_hashes=[HASH],
        lora_request=None,
        cache_salt=salt,
        kv_transfer_params=params_of(tenant),
    )


def opened(book, request):
    book.show(request)
    return book.open(request.request_id, request.kv_transfer_params)


def test_a_requests_keys_have_its_tenant_whichever_way_it_is_named(book):
    plain, blue, red = (opened(book, shown(name or "none", name)) for name in (None, "blue", "red"))
    assert plain.keys.of(KEY) == KEY
    assert blue.keys.of(KEY) == make_offload_key(HASH, 0, "blue")
    assert red.keys.of_all([KEY]) == [make_offload_key(HASH, 0, "red")]
    salted = opened(book, shown("salted", salt="blue:secret"))
    assert tenant_of(salted.keys.of(KEY)) == "blue"
    assert salted.keys.of(KEY) != blue.keys.of(KEY), "the salt is in its hash"
    assert salted.context.params == {"kvtiers_tenant": "blue"}, "for recordings, and for the manager"


def test_a_probe_that_is_sent_ahead_names_the_same_chunks_as_the_lookup(book):
    request = shown("one", "blue")
    ahead = book.announced(request)[0].keys
    assert list(ahead) == [make_offload_key(HASH, 0, "blue")]
    assert opened(book, request).keys.of(KEY) == ahead[0]
    salted = book.announced(shown("two", salt="red:x"))[0].keys
    assert tenant_of(salted[0]) == "red"


@pytest.mark.parametrize(
    ("tenant", "salt"), [("Blue", None), ("../x", None), (7, None), ("red", "blue:x"), (None, "B:")]
)
def test_a_request_whose_tenant_may_not_be_has_no_keys_and_is_not_probed_for(book, tenant, salt, caplog):
    request = shown("one", tenant, salt)
    assert book.announced(request) == []
    assert opened(book, request).keys is None
    assert len([record for record in caplog.records if "runs without tiers" in record.getMessage()]) == 1


def test_keys_of_tenants_never_collide_with_those_of_salts_and_adapters():
    def key(**more):
        return RequestKeys(GROUPS, [HASH], more.pop("adapter", b""), more.pop("salt", ""), **more).of(KEY)

    keys = [key(), key(tenant="x"), key(salt="x"), key(adapter=b"x"), key(salt="x", tenant="x"), key(tenant="y")]
    assert len(set(keys)) == len(keys)


# -- under vLLM's own tiering


class Recorded(TierDriver):
    """A driver that notes what it is asked and given, and says how jobs end."""

    def __init__(self):
        super().__init__(TierSlot(0, OffTier(), TierOptions("near")), 0.02, lambda _: None)
        self.keys = []
        self.results = []
        self.left_out = []

    def request_started(self, request_id, params, *, left_out=False):
        self.left_out.append(left_out)
        super().request_started(request_id, params, left_out=left_out)

    def lookup(self, key, request_id):
        self.keys.append(key)
        return super().lookup(key, request_id)

    def announce(self, keys):
        self.keys += keys

    def submit(self, job_id, keys, rows, request_id, *, is_promotion, ends=lambda _key: None):
        self.keys += keys
        assert [ends(key) for key in keys] == [16] * len(keys), "vLLM is asked by its own keys"
        self.results.append(JobResult(job_id, success=False, successful_keys=list(keys)))

    def finished(self):
        return [*super().finished(), *self.results]


@pytest.fixture
def driver():
    return Recorded()


@pytest.fixture
def tier(monkeypatch, driver):
    module = fake_vllm.load(monkeypatch, "own_tiering.tier", "0.32.0")
    settings = TierSettings(tenants={"unknown": False, "named": {"blue": {}, "red": {}}})
    monkeypatch.setattr(module, "load_tier_options", lambda *_: (SimpleNamespace(tier_name="near"), settings))
    monkeypatch.setattr(module, "open_status", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(module, "open_tier", lambda *_: OpenedTier(driver, "near", "model", shared=True))
    group = SimpleNamespace(tokens_per_block=16, group_id=0)
    config = SimpleNamespace(groups=(group,), cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1))
    with being_built(Engine(SimpleNamespace(), None)):
        return module.KvtiersTier(SimpleNamespace(extra_config={}, config=config), memoryview(bytes(8)), "kvtiers-near")


def context(tenant=None):
    return SimpleNamespace(req_id="a", kv_transfer_params=params_of(tenant), get_offload_key_position={KEY: 16}.get)


def job(tenant=None):
    return SimpleNamespace(job_id=7, keys=[KEY], chunk_ids=np.array([3]), req_context=context(tenant))


def test_every_call_names_the_chunks_of_the_requests_tenant_and_vllm_gets_its_own_keys(tier, driver):
    for tenant in ("blue", "red"):
        driver.keys.clear()
        driver.results.clear()
        tier.on_new_request(context(tenant))
        tier._arrived(Arrived(request_id="a", kv_transfer_params=context(tenant).kv_transfer_params))
        tier.lookup(KEY, context(tenant))
        tier.submit_load(job(tenant))
        tier.on_request_finished(context(tenant))
        tier.submit_store(job(tenant))
        assert driver.keys == [make_offload_key(HASH, 0, tenant)] * 4, "also for a store of a request that is over"
        assert [result.successful_keys for result in tier.get_finished_jobs()] == [[KEY], [KEY]]


class Arrived(SimpleNamespace):
    """vLLM's request, of which there may be weak references."""

    cache_salt = None
    num_prompt_tokens = 16
    block_hashes = (HASH,)


@pytest.mark.parametrize("tenant", ["green", "Blue", 7])
def test_a_request_whose_tenant_may_not_be_finds_and_stores_nothing(tier, driver, tenant, caplog):
    tier.on_new_request(context(tenant))
    tier._arrived(Arrived(request_id="a", kv_transfer_params=context(tenant).kv_transfer_params))
    assert tier.lookup(KEY, context(tenant)).name == "MISS"
    tier.submit_store(job(tenant))
    assert driver.left_out == [True]
    assert driver.keys == []
    assert [(result.job_id, result.success) for result in tier.get_finished_jobs()] == [(7, True)], "no failure"
    assert len([record for record in caplog.records if "runs without tiers" in record.getMessage()]) == 1


def test_without_a_tenant_the_keys_are_vllms_own(tier, driver):
    tier.on_new_request(context())
    tier.lookup(KEY, context())
    assert driver.keys == [KEY]


def test_a_config_for_vllms_own_tiering_has_the_tenants_of_the_yaml():
    document = {
        "version": 1,
        "primary": {"capacity": "1MiB"},
        "tenants": {"required": True},
        "secondary": [{"type": "memory", "capacity": "1MiB", "quotas": {"*": "512KiB"}}],
    }
    made = transfer_config(load_config(document), document)["kv_connector_extra_config"]
    assert made["kvtiers"]["tenants"] == {"required": True}
    (entry,) = made["secondary_tiers"]
    options = {name: value for name, value in entry.items() if name != "type"}
    assert load_tier_options(entry["type"], options, made)[1].tenant_rule().of({}) is None, "a tenant is required"
    document["tenants"]["named"] = {"blue": {"share": "10%"}}
    with pytest.raises(ConfigError, match=r"tenants\.named: needs the whole stack"):
        transfer_config(load_config(document), document)


def test_tenants_are_checked_as_in_the_yaml_and_what_needs_the_whole_stack_is_refused_by_name():
    options = {"capacity": "1MiB", "quotas": {"blue": "1MiB", "*": "512KiB"}}
    config, settings = load_tier_options("kvtiers-memory", options, {"kvtiers": {"tenants": {"unknown": False}}})
    assert config.quotas == {"blue": 1 << 20, "*": 512 << 10}
    assert not settings.tenants.unknown
    for tenants, line in (
        ({"salt_separator": ":"}, "kvtiers: tenants.salt_separator: needs the whole stack (KvtiersConnector)"),
        ({"named": {"blue": {"share": "10%"}}}, "kvtiers: tenants.named: needs the whole stack (KvtiersConnector)"),
        ({"named": {"Blue": {}}}, "kvtiers.tenants.named: tenant 'Blue' cannot be used"),
        ({"unknwon": True}, "kvtiers: tenants: unknown option 'unknwon'. Did you mean 'unknown'?"),
    ):
        with pytest.raises(ConfigError, match="kv_connector_extra_config") as refused:
            load_tier_options("kvtiers-memory", options, {"kvtiers": {"tenants": tenants}})
        assert line in str(refused.value)
