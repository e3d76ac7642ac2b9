"""LMCache's own tools see an adapter that works: ``lmcache bench l2``, and the check of its adapters."""

import asyncio
import json
import re

import pytest
from lmcache.cli.main import main as lmcache
from lmcache.v1.check.check_mode_test_l2_adapter import run_test_mode

from .conftest import params_of


@pytest.fixture
def spec(config):
    """The adapter, as ``--l2-adapter`` has it. ``more``: other params."""

    def spec(**more):
        where = {"type": "plugin", "module_path": "kvtiers_lmcache", "class_name": "KvtiersL2Adapter"}
        return json.dumps({**where, "adapter_params": params_of(config, **more)})

    return spec


def bench(spec, *options):
    lmcache(["bench", "l2", "--l2-adapter", spec, "--num-keys", "4", "--lookup-max-hit-rate", "1", *options])


def test_its_benchmark_stores_finds_and_loads(spec, capsys):
    bench(spec(kv_dtype="bytes"), "--no-skip-verify")
    text = capsys.readouterr().out
    assert re.findall(r"Total success: +(\d+)", text) == ["4", "4", "4"], text
    assert "All 4 keys data verified OK" in text


def test_its_check_finds_what_it_has_stored_and_nothing_else(spec, capsys):
    asyncio.run(run_test_mode("test/model", l2_adapter=[spec()], obj_size=4096, num_keys=3))
    text = capsys.readouterr().out
    for line in ("3/3 correctly absent", "Batch store OK", "3/3 found", "(loaded): 3/3", "(content): 3/3"):
        assert line in text, text


def test_one_line_says_all_that_has_to_be_set_for_values_to_be_stored(spec, capsys, said):
    bench(spec(weights=""))
    assert re.findall(r"Total success: +(\d+)", capsys.readouterr().out) == ["0", "0", "0"]
    (line,) = said()
    assert "set 'weights'" in line
    assert "set 'kv_dtype'" in line
