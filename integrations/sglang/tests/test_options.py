"""The options beside SGLang's own keys: what is taken, and one line for what is not."""

import json

import pytest
from sglang.srt.mem_cache.pool_host.common import get_allocator_type

from kvtiers.api import ConfigError
from kvtiers_sglang.options import extra_config, options_of, tiers_of

from .parts import published

OURS = {"interface_v1": 1, "config": "tiers.yaml"}


def test_sglangs_own_keys_are_no_options_of_ours_and_defaults_are_stated():
    sglangs = {"backend_name": "x", "module_path": "y", "class_name": "z", "allocator": "shm", "file_storage_path": "f"}
    options = options_of({**OURS, **sglangs})
    assert (options.config, options.weights, options.draft_weights, options.deadline) == ("tiers.yaml", "", "", 5.0)


def test_quantities_are_written_as_in_a_config():
    options = options_of({**OURS, "deadline": "250ms", "bounce_bytes": "1MiB", "weights": "abc"})
    assert (options.deadline, options.bounce_bytes, options.weights) == (0.25, 1 << 20, "abc")


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"config": "tiers.yaml"}, "'interface_v1' is not set"),
        ({"interface_v1": 1}, "'config': .*required, or set KVTIERS_CONFIG"),
        ({**OURS, "dead_line": "1s"}, "'dead_line'"),
        ({**OURS, "deadline": 5}, "'deadline'.*no unit"),
        ({**OURS, "weights": 7}, "'weights'"),
        (None, "'interface_v1' is not set"),
    ],
)
def test_a_wrong_option_is_one_line(extra, said, monkeypatch):
    monkeypatch.delenv("KVTIERS_CONFIG", raising=False)
    with pytest.raises(ConfigError, match=said) as error:
        options_of(extra)
    assert all(line.startswith("--hicache-storage-backend-extra-config: ") for line in error.value.problems)


@pytest.mark.parametrize(
    ("tenant", "tenants", "said"),
    [
        ("Blue", {}, "tenant 'Blue' cannot be used"),
        ("red", {"unknown": False, "named": {"blue": {}}}, "tenant 'red' is not among 'tenants.named'"),
        ("red", None, "the config has no 'tenants'; add 'tenants: {}'"),
        ("", {"required": True}, "no tenant is named"),
    ],
)
def test_a_tenant_that_the_tiers_do_not_allow_is_one_line(tenant, tenants, said):
    config = {"version": 1, "primary": {"capacity": "1MiB"}, "secondary": []}
    given = {**OURS, "config": config | ({} if tenants is None else {"tenants": tenants}), "tenant": tenant}
    with pytest.raises(ConfigError, match=said) as error:
        tiers_of(options_of(given))
    assert str(error.value).startswith("--hicache-storage-backend-extra-config: 'tenant': ")
    assert "\n" not in str(error.value)
    assert tiers_of(options_of({**given, "config": config | {"tenants": {}}, "tenant": "red"})).tenants


def test_the_variable_stands_for_the_config_and_an_argument_wins(monkeypatch):
    monkeypatch.setenv("KVTIERS_CONFIG", "/from/variable.yaml")
    assert options_of({"interface_v1": 1}).config == "/from/variable.yaml"
    assert options_of(OURS).config == "tiers.yaml"


def test_what_the_plugin_writes_is_what_the_backend_reads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert options_of(extra_config("tiers.yaml")).config == str(tmp_path / "tiers.yaml")


def test_the_plugin_asks_for_pools_that_can_be_mapped_but_where_the_environment_says_otherwise(monkeypatch):
    """SGLang's own reading of it, from published arguments: it decides what its pools are made of."""

    def allocator():
        given = json.dumps(extra_config("tiers.yaml"))
        with published(hicache_storage_backend="dynamic", hicache_storage_backend_extra_config=given):
            return get_allocator_type()

    for name, plain, other in (
        ("SGLANG_HUGEPAGE_SIZE", " ", "2MB"),
        ("SGLANG_HICACHE_HOST_PARALLEL_ALLOC_THREADS", "0", "4"),
        ("HSA_USERPTR_FOR_PAGED_MEM", "1", "0"),
    ):
        monkeypatch.setenv(name, plain)
        assert allocator() == "shm", (name, plain)
        monkeypatch.setenv(name, other)
        assert allocator() == "dynamic", "which is SGLang's default"
        monkeypatch.delenv(name)
    assert allocator() == "shm"
