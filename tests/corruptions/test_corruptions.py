"""A batch of damaged values of each tier kind, and what makes such a run fail."""

import importlib.util
from pathlib import Path

import pytest

from kvtiers.layout.seal import PlainSeal, SealVerdict

_spec = importlib.util.spec_from_file_location("kvtiers_corruptions", Path(__file__).with_name("corruptions.py"))
corruptions = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(corruptions)


@pytest.mark.parametrize("kind", corruptions.KINDS)
def test_what_a_damaged_value_gives_is_the_right_bytes_or_a_miss(kind, capsys):
    if lacks := corruptions.missing(kind):
        pytest.skip(f"no {lacks} here")
    assert corruptions.main(["--count", "90", "--kinds", kind]) == 0
    said = capsys.readouterr().out
    assert f"{kind}: 92 corruptions in" in said
    assert "ok: every load gave the right bytes or was a miss" in said


def test_a_wrong_byte_fails_the_run_and_is_named(monkeypatch, capsys):
    monkeypatch.setattr(PlainSeal, "check", lambda *_: SealVerdict.OK)
    assert corruptions.main(["--count", "90", "--kinds", "memory"]) == 1
    said = capsys.readouterr().out
    assert "memory: wrong bytes: " in said
    assert "were not loaded" not in said


def test_a_run_that_loads_nothing_fails(monkeypatch, capsys):
    monkeypatch.setattr(PlainSeal, "check", lambda *_: SealVerdict.CORRUPT)
    assert corruptions.main(["--count", "90", "--kinds", "memory"]) == 1
    assert "memory: 4 values that were not damaged were not loaded" in capsys.readouterr().out


def test_a_kind_that_does_not_exist_is_named_with_those_that_do(capsys):
    with pytest.raises(SystemExit):
        corruptions.main(["--kinds", "memory,tape"])
    expected = "memory, memory-async, fs, fs-slab, redis, s3, gcs, azure, mooncake"
    assert f"unknown kind 'tape'; expected some of {expected}" in capsys.readouterr().err
