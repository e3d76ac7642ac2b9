"""Tenants in LMCache: by a key's salt or tag, and one line for a tenant that the config does not allow."""

import pytest

from kvtiers import load_config
from kvtiers._log_queue import flush_logs
from kvtiers.api import ConfigError
from kvtiers_lmcache.key_tenants import KeyTenants
from kvtiers_lmcache.options import Options

from .conftest import config_of, params_of
from .parts import Server, keys_of
from .test_connector import Engine


def tenants_in(tmp_path):
    """Return the tenants whose values are in the directory, "" for no one's."""
    values = [path for path in (tmp_path / "fs").rglob("*") if path.is_file() and "_layout" not in path.parts]
    return {next((part for part in path.parts if part.startswith("t-")), "") for path in values if path.name[0] != "."}


@pytest.fixture
def tiers(config):
    return config | {"tenants": {}}


def test_the_salt_is_the_tenant(serve, tiers, tmp_path, caplog):
    server = serve(config=tiers, salt_is_tenant=True)
    salts = ("blue", "red", "")
    keys = [key for salt in salts for key in keys_of(2, cache_salt=salt)]
    stored = server.store(keys)
    assert tenants_in(tmp_path) == {"t-blue", "t-red", ""}
    assert serve(config=tiers, salt_is_tenant=True).fetch(keys) == stored, "in one call, as another server finds them"
    assert serve(config=tiers).fetch(keys) == [None] * 4 + stored[4:], "without the option they are no tenants"
    server.adapter.delete(keys[:2])
    assert server.fetch(keys) == [None, None, *stored[2:]]
    wrong = keys_of(2, cache_salt="Not one")
    result = server.put([*wrong, *keys[:1]], server.memory.filled(3, server.layout, 1))
    assert not result.is_successful()
    assert server.lookup([*wrong, *keys[:1]]) == [False, False, True]
    assert server.adapter.report_status()["failed_tasks"] == {"store": 0, "lookup": 0, "load": 0}
    flush_logs(30.0)  # another thread handles them
    assert "tenant 'Not one' cannot be used; expected 1 to 64 of" in caplog.text


def test_the_tenant_stands_before_the_separator_of_the_salt_or_is_that_of_the_server(serve, config, tmp_path):
    server = serve(config=config | {"tenants": {"salt_separator": ":"}}, tenant="green")
    keys = [key for salt in ("blue:9f", "blue:3c", "user", "") for key in keys_of(1, cache_salt=salt)]
    stored = server.store(keys)
    assert server.fetch(keys) == stored
    assert tenants_in(tmp_path) == {"t-blue", "t-green"}


def test_a_request_names_its_tenant_by_a_tag_inside_an_engine(tiers, tmp_path, caplog):
    engine = Engine(params_of(tiers, tenant="green"))
    try:
        named = {name: {"lmcache.tag.kvtiers_tenant": name} for name in ("blue", "Blue")}
        blue, wrong = (engine.keys(2, request_configs=named[name]) for name in ("blue", "Blue"))
        stored = [engine.store(keys, seed) for seed, keys in enumerate((blue, engine.keys(2)))]
        engine.store(wrong)
        assert tenants_in(tmp_path) == {"t-blue", "t-green"}
        assert engine.load([*blue, *wrong, *engine.keys(2)]) == [*stored[0], None, None, *stored[1]]
        assert engine.remote.batched_contains([*blue, *engine.keys(2), *wrong, *blue]) == 4
        assert not engine.connector.remove_sync(wrong[0])
        assert engine.connector.remove_sync(blue[0])
        assert engine.load(blue) == [None, stored[0][1]]
        assert engine.connector.failed_calls == 0
        assert engine.free_bytes() == engine.free
    finally:
        engine.close()
    flush_logs(30.0)
    assert "tenant 'Blue' cannot be used" in caplog.text


@pytest.mark.parametrize(
    ("options", "tenants", "line"),
    [
        ({"tenant": "Blue"}, {}, "tenant 'Blue' cannot be used"),
        ({"tenant": "red"}, {"unknown": False}, "tenant 'red' is not among 'tenants.named'"),
        ({"tenant": "red"}, None, "the config has no 'tenants'; add 'tenants: {}'"),
        ({"salt_is_tenant": True}, None, "'salt_is_tenant' is set, but the tiers' config has no 'tenants'"),
        ({"salt_is_tenant": True}, {"salt_separator": ":"}, "'tenants.salt_separator' in the tiers' config; leave one"),
    ],
)
def test_options_that_cannot_be_are_one_line_at_the_start(memory, options, tenants, line):
    config = config_of({"type": "memory", "capacity": "1MiB"}) | ({} if tenants is None else {"tenants": tenants})
    with pytest.raises(ConfigError, match=line) as refused:
        Server(params_of(config, **options), memory)
    assert "\n" not in str(refused.value)


def test_a_tenant_is_required_where_the_config_says_so():
    config = load_config(config_of() | {"tenants": {"required": True}})
    assert KeyTenants(Options(config=""), config).of_salts(["a", ""]) == {"a": None, "": None}
    named = KeyTenants(Options(config="", tenant="blue", salt_is_tenant=True), config)
    assert named.of_salts(["a", ""]) == {"a": "a", "": "blue"}
    assert named.of_tags([("kvtiers_tenant", 5)]) is None, "what is no text is never taken for no tenant"
