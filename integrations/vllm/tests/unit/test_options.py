"""A tier's options in vLLM's config are those of its YAML, checked the same way, each problem in one line."""

import pytest

from kvtiers.api import ConfigError
from kvtiers_vllm.own_tiering.options import load_tier_options


def problems(options, extra=None, tier="kvtiers-memory"):
    with pytest.raises(ConfigError) as refused:
        load_tier_options(tier, options, extra or {})
    return refused.value.problems


def test_units_defaults_and_variables_are_those_of_the_yaml(monkeypatch):
    monkeypatch.setenv("HOW_MUCH", "3MiB")
    config, settings = load_tier_options(
        "kvtiers-memory", {"capacity": "${HOW_MUCH}", "deadline": "3s"}, {"kvtiers": {"namespace": "prod"}}
    )
    assert (config.type, config.capacity, config.deadline) == ("memory", 3 << 20, 3.0)
    assert (settings.namespace, settings.lookup_wait, settings.drain) == ("prod", 0.02, 10.0)


def test_a_wrong_option_is_named_with_its_place():
    (line,) = problems({"capacity": "1MiB", "capactiy": 1})
    assert line.startswith("kv_connector_extra_config: secondary_tiers (kvtiers-memory): unknown option 'capactiy'")
    assert "Did you mean 'capacity'?" in line


def test_a_tier_that_is_not_installed_is_named():
    (line,) = problems({}, tier="kvtiers-memroy")
    assert "unknown tier type 'memroy'. Did you mean 'memory'?" in line


def test_a_wrong_option_for_all_tiers_is_named():
    (line,) = problems({"capacity": "1MiB"}, {"kvtiers": {"namespce": "x"}})
    assert line.startswith("kv_connector_extra_config: kvtiers: unknown option 'namespce'")
    (line,) = problems({"capacity": "1MiB"}, {"kvtiers": {"namespace": "UPPER"}})
    assert line.startswith("kv_connector_extra_config: kvtiers.namespace: ")


def test_what_needs_kvtiers_own_primary_is_refused_by_name():
    (line,) = problems({"capacity": "1MiB", "admission": "expected-reuse"})
    assert "admission: 'expected-reuse' needs the whole stack" in line
    (line,) = problems({"capacity": "1MiB", "admission": "on_eviction"})
    assert "KvtiersConnector" in line
    assert "admission: 'on_eviction'" in line


def test_two_tiers_of_one_name_are_refused_as_in_the_yaml():
    near, far = ({"type": "kvtiers-memory", "capacity": capacity} for capacity in ("1MiB", "2MiB"))
    own = {"capacity": "1MiB"}
    (line,) = problems(own, {"secondary_tiers": [near, far]})
    assert line.startswith("kv_connector_extra_config: secondary_tiers (kvtiers-memory): the name 'memory' is that of")
    (line,) = problems(own | {"name": "x"}, {"secondary_tiers": [near | {"name": "x"}, far | {"name": "x"}]})
    assert "the name 'x' is that of another tier, too; give one of them another 'name'" in line
    theirs = {"type": "memory"}  # vLLM's own, whose figures are vLLM's
    config, _ = load_tier_options("kvtiers-memory", own, {"secondary_tiers": [theirs, near, far | {"name": "far"}]})
    assert config.tier_name == "memory"
