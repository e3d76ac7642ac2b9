"""Sizes as people write them, and the cases that follow from lists and a config."""

import pytest

from kvtiers.api import ConfigError
from kvtiers.config import load_config
from kvtiers_replay.plan import PlanSizes, PlanTier, Wanted, plan_cases


@pytest.mark.parametrize(
    ("text", "chunks"),
    [("10%", 100), ("0.01%", 1), ("0%", 0), ("100%", 1000), ("unlimited", None), ("8MiB", 2), ("9000000", 2), ("0", 0)],
)
def test_a_size_is_a_share_bytes_or_unlimited(text, chunks):
    assert PlanSizes(1000, 4 << 20).parse("--primary", text) == chunks


@pytest.mark.parametrize(
    ("text", "value_bytes", "problem"),
    [
        (
            "ten",
            4096,
            "--primary: expected a size such as '64GiB', got 'ten'; or a share such as '10%', or 'unlimited'",
        ),
        ("8XiB", 4096, "--primary: unknown unit 'XiB'"),
        ("101%", 4096, "--primary: expected a share from 0% to 100% of the trace's chunks, got '101%'"),
        ("nan%", 4096, "--primary: expected a share from 0% to 100%"),
        ("-1%", 4096, "--primary: expected a share from 0% to 100%"),
        ("64GiB", None, "--primary: 64GiB is how many chunks? Give --model or --bytes-per-token, or sizes as shares"),
        ("1KiB", 4096, "--primary: 1KiB does not hold one chunk of 4KiB"),
    ],
)
def test_a_wrong_size_is_one_line_that_says_what_is_expected(text, value_bytes, problem):
    with pytest.raises(ConfigError) as refused:
        PlanSizes(1000, value_bytes).parse("--primary", text)
    assert str(refused.value).startswith(problem)


def test_a_chunk_takes_what_a_sealed_value_takes():
    sizes = PlanSizes.of_tokens(1000, 512, 128 * 1024)
    assert sizes.value_bytes == (64 << 20) + 4096
    assert PlanSizes.of_tokens(1000, 1, 4032).value_bytes == 4096
    assert sizes.shown(100) == "10 % (6.3GiB)"
    assert PlanSizes(1000).shown(100) == "10 % (100)"
    assert (sizes.shown(None), sizes.shown(0)) == ("unlimited", "none")


CONFIG = {
    "version": 1,
    "primary": {"capacity": "400KiB", "eviction": "arc"},
    "secondary": [
        {"type": "memory", "capacity": "800KiB", "admission": "second_access"},
        {"type": "memory-async", "name": "far", "max_blocks": 5, "read_only": True},
    ],
    "budgets": {"one_tier": "30%"},
}


def test_without_lists_the_cases_are_the_configs_own_and_the_usual_shares():
    config = load_config(CONFIG)
    cases = plan_cases(Wanted(), PlanSizes(1000, 4096), config)
    assert [case.primary for case in cases] == [20, 50, 100, 200, 500, 1000]  # 400 KiB are 100 chunks too
    tiers = (PlanTier("memory", 200, "second_access"), PlanTier("far", None, read_only=True))
    assert {(case.policy, case.tiers) for case in cases} == {("arc", tiers)}
    assert cases[0].budgets.one_tier == 0.3


def test_the_shares_of_tenants_are_those_of_the_config():
    config = load_config(CONFIG | {"tenants": {"named": {"blue": {"share": "20%"}, "red": {}}}})
    (case,) = plan_cases(Wanted(["10%"]), PlanSizes(1000, 4096), config)
    assert case.shares == (("blue", 0.2),)


def test_quotas_of_a_tier_that_keeps_them_by_itself_are_simulated_like_those_of_a_store():
    options = {"name": "tier", "quotas": {"blue": "42KiB"}}
    tiers = ({"type": "memory", "capacity": "1GiB", **options}, {"type": "memory-async", "max_blocks": 9, **options})
    found = []
    for tier in tiers:
        config = load_config(CONFIG | {"tenants": {}, "secondary": [tier]})
        (case,) = plan_cases(Wanted(["10%"], {"": ["unlimited"]}), PlanSizes(1000, 4096), config)
        found.append(case.tiers)
    assert found == [(PlanTier("tier", None, quotas=(("blue", 10),)),)] * 2


def test_quotas_are_those_of_the_config_and_one_that_holds_no_value_is_one_of_none():
    tier = {"type": "memory", "capacity": "800KiB", "quotas": {"blue": "42KiB", "*": "3KiB"}}
    config = load_config(CONFIG | {"tenants": {}, "secondary": [tier]})
    (case,) = plan_cases(Wanted(["10%"]), PlanSizes(1000, 4096), config)
    assert case.tiers == (PlanTier("memory", 200, quotas=(("blue", 10), ("*", 0))),)
    (case,) = plan_cases(Wanted(["10%"], {"": ["50%"]}), PlanSizes(1000), config)
    assert case.tiers == (PlanTier("memory", 500),), "the size of a value is not known"


def test_admission_by_expected_reuse_is_simulated_as_configured():
    tier = {"type": "memory", "capacity": "800KiB", "admission": "expected-reuse", "may_lose": "2%"}
    config = load_config(CONFIG | {"secondary": [tier | {"writes_per_hour": "400KiB"}]})
    (case,) = plan_cases(Wanted(["10%"]), PlanSizes(1000, 4096), config)
    assert case.tiers == (PlanTier("memory", 200, "expected-reuse", may_lose=0.02, writes_per_hour=100),)
    with pytest.raises(ConfigError, match="writes_per_hour: 400KiB is how many chunks"):
        plan_cases(Wanted(["10%"], {"": ["50%"]}), PlanSizes(1000), config)


def test_lists_are_combined_and_a_tier_of_size_0_is_not_there():
    sizes = PlanSizes(1000)
    wanted = Wanted(["20%", "10%", "10%"], {"": ["0", "50%"], "far": ["unlimited", "1%"]}, ["lru", "arc"])
    cases = plan_cases(wanted, sizes, load_config(CONFIG))
    assert len(cases) == 2 * 2 * 2 * 2
    assert [case.primary for case in cases[:4]] == [100, 200, 100, 200]
    assert [tier.name for tier in cases[0].tiers] == ["far"]
    assert [tier.chunks for tier in cases[-1].tiers] == [500, None]
    assert {case.policy for case in cases} == {"lru", "arc"}


def test_without_a_config_there_is_a_primary_and_at_most_one_tier():
    assert {case.tiers for case in plan_cases(Wanted(), PlanSizes(1000))} == {()}
    (case,) = plan_cases(Wanted(["1%"], {"": ["5%"]}), PlanSizes(1000))
    assert case.tiers == (PlanTier("secondary", 50),)


@pytest.mark.parametrize(
    ("wanted", "config", "problem"),
    [
        (Wanted(["0"]), None, "--primary: '0' is no primary at all, expected at least one chunk"),
        (Wanted(policies=["lrru"]), None, "unknown eviction policy 'lrru'. Did you mean 'lru'?"),
        (
            Wanted(secondary={"memroy": ["1%"]}),
            CONFIG,
            "--secondary: no tier is called 'memroy'. Did you mean 'memory'?",
        ),
        (Wanted(["1%"]), CONFIG, "the config's tier 'memory': capacity: 800KiB is how many chunks?"),
        (Wanted(secondary={"": ["1%"]}), CONFIG, "the config's primary.capacity: 400KiB is how many chunks?"),
        (Wanted([f"{n / 50}%" for n in range(1, 2100)]), None, "2,099 combinations of sizes and policies, expected at"),
    ],
)
def test_what_cannot_be_planned_is_one_line(wanted, config, problem):
    with pytest.raises(ConfigError) as refused:
        plan_cases(wanted, PlanSizes(100_000), config and load_config(config))
    assert str(refused.value).startswith(problem)
    assert len(refused.value.problems) == 1


def test_a_primary_far_larger_than_the_trace_costs_no_memory_for_its_rows():
    (case,) = plan_cases(Wanted(["1PiB"]), PlanSizes(1000, 4096))
    assert case.primary == 4000
