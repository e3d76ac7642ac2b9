"""How many tier hosts a tier may have, and what cannot be together with several."""

import pytest

from kvtiers.config import load_config

PLACE = "secondary[0] (shelf): "


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("processes: 0", "processes: expected 1 to 16 or 'auto', got 0"),
        ("processes: 17", "processes: expected 1 to 16 or 'auto', got 17"),
        ("processes: many", "processes: expected a whole number or 'auto', got 'many'"),
        ("processes: yes", "processes: expected a whole number or 'auto', got true"),
        ("cpus: [0, -1]", "cpus[1]: expected at least 0, got -1"),
        ("cpus: [100000000000000000000]", "cpus[0]: expected less than 65536, got 100000000000000000000"),
        ("processes: 2\nio: thread", "'processes: 2' needs 'io: process'"),
        ("processes: 2", "'processes: 2': a store of this type belongs to one tier host; leave the option out"),
    ],
)
def test_what_cannot_be_is_one_line(wrong, with_tier, options, line):
    assert wrong(with_tier(options)) == [PLACE + line]


@pytest.mark.parametrize("processes", ["1", "auto"])
def test_one_host_is_asked_for_anywhere(shelf, tiers_yaml, with_tier, processes):
    tiers_yaml.write_text(with_tier(f"processes: {processes}\nio: thread"))
    (tier,) = load_config(tiers_yaml).secondary
    assert str(tier.processes) == processes


def test_a_store_that_says_that_it_can_be_shared_may_have_several(distributions, tiers_yaml, with_tier, monkeypatch):
    distributions.tier("shelf", options="path: str", facts="shareable=True")
    monkeypatch.setenv("HOSTS", "3")
    tiers_yaml.write_text(with_tier("processes: ${HOSTS}"))
    (tier,) = load_config(tiers_yaml).secondary
    assert tier.processes == 3
