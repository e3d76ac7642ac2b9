"""The option ``compression``: what it takes, and the line where its library is not installed."""

import sys

import pytest

from kvtiers.config import load_config


@pytest.mark.parametrize("compression", ["none", "read", "zstd"])
def test_a_store_takes_it(shelf, tiers_yaml, with_tier, compression):
    tiers_yaml.write_text(with_tier(f"compression: {compression}"))
    (tier,) = load_config(tiers_yaml).secondary
    assert tier.compression == compression


def test_another_codec_is_one_line_that_names_those_that_there_are(wrong, shelf, with_tier):
    [line] = wrong(with_tier("compression: lz4"))
    assert "secondary[0] (shelf): compression: " in line
    assert all(name in line for name in ("none", "read", "zstd", "lz4"))


@pytest.mark.parametrize("compression", ["read", "zstd"])
def test_a_missing_library_is_one_line_that_says_what_to_install(wrong, shelf, with_tier, monkeypatch, compression):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    [line] = wrong(with_tier(f"compression: {compression}"))
    assert line.startswith(
        f"secondary[0] (shelf): compression: 'compression: {compression}' needs the package zstandard"
    )
    assert "pip install 'kvtiers[compression]'" in line


def test_without_the_option_the_library_is_not_asked_for(shelf, tiers_yaml, with_tier, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    tiers_yaml.write_text(with_tier(""))
    assert load_config(tiers_yaml).secondary[0].compression == "none"
