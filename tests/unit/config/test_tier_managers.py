"""Options that core obeys for stores alone: a tier that moves its values by itself does not take them in silence."""

import pytest

from kvtiers.api import TierConfig
from kvtiers.api.config import HOST_OPTIONS
from kvtiers.config import load_config

OF_EVERY_TIER = """
name: mine
io: thread
required: true
read_only: true
deadline: 9s
breaker: {failures: 2}
admission: expected-reuse
may_lose: 0.02
writes_per_hour: 1GiB
encrypt: false
"""


@pytest.fixture
def with_manager(distributions, with_tier):
    """Install the tier type ``peers``, which moves its values by itself; return what writes a config with one."""

    def build(options: str, own: str = "path: str") -> str:
        distributions.tier("peers", options=own, kind="manager")
        return with_tier(options).replace("type: shelf", "type: peers")

    return build


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("processes: auto", "processes"),
        ("cpus: [0]", "cpus"),
        ("nice: 0", "nice"),
        ("threads: 8", "threads"),
        ("grace: 1s", "grace"),
        ("retries: 0", "retries"),
        ("store_queue: 9", "store_queue"),
        ("exists_ttl: 1s", "exists_ttl"),
        ("compression: zstd", "compression"),
        ("quotas: {blue: 1GiB}", "quotas"),
        ("rate_limit: {requests_per_second: 10}", "rate_limit"),
        ("io: process", "io: process"),
    ],
)
def test_what_it_does_not_have_is_one_line(wrong, with_manager, options, named):
    [line] = wrong(with_manager(options))
    assert line == (
        f"secondary[0] (peers): {named}: no effect here: a tier of this type moves its values by itself, in the "
        "engine's process; leave it out"
    )


def test_all_that_it_does_not_have_stands_in_one_line(wrong, with_manager):
    [line] = wrong(with_manager("threads: 8\nretries: 0\ndeadline: 9s"))
    assert "retries, threads: no effect" in line
    assert line.endswith("leave them out")


def test_what_core_obeys_for_every_tier_is_taken(tiers_yaml, with_manager):
    tiers_yaml.write_text(with_manager(OF_EVERY_TIER))
    (tier,) = load_config(tiers_yaml).secondary
    assert (tier.name, tier.deadline, tier.breaker.failures) == ("mine", 9.0, 2)


def test_an_option_that_the_type_declares_again_is_its_own(tiers_yaml, with_manager):
    tiers_yaml.write_text(with_manager("threads: 8", "path: str\nthreads: int = 2"))
    (tier,) = load_config(tiers_yaml).secondary
    assert tier.threads == 8


def test_quotas_that_the_type_declares_are_kept_by_the_tier(tiers_yaml, with_manager):
    own = "path: str\nquotas: dict[str, int] = {}"
    tiers_yaml.write_text(with_manager("quotas: {blue: 4096}", own) + "tenants: {}\n")
    (tier,) = load_config(tiers_yaml).secondary
    assert tier.quotas == {"blue": 4096}


def test_a_store_takes_them_all(shelf, tiers_yaml, with_tier):
    tiers_yaml.write_text(with_tier("threads: 8\nio: process\nnice: 0"))
    (tier,) = load_config(tiers_yaml).secondary
    assert tier.threads == 8


def test_every_option_is_one_of_every_tier_or_of_a_store():
    """A new one is to be sorted into one of the two."""
    every = {"type", *(line.partition(":")[0] for line in OF_EVERY_TIER.strip().splitlines())}
    assert every | HOST_OPTIONS == set(TierConfig.model_fields)
    assert not every & HOST_OPTIONS
