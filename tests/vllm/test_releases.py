"""Other releases of vLLM: a smoke where one runs on a CPU; its own manager over a tier, without an engine, for all."""

import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import PROMPTS, WHOLE
from .engines import EngineError, release_folder
from .ways import fs, tiers, whole_stack

CONTRACT = Path(__file__).parent / "engine" / "contract.py"
MORE = [pytest.param(version, marks=pytest.mark.every_release) for version in ("0.28.0", "0.29.0", "0.30.0", "0.31.0")]


@pytest.mark.parametrize(
    ("version", "way"),
    [("0.28.0", tiers), ("0.30.0", tiers), ("0.30.0", whole_stack)],
    ids=["0.28.0-tiers", "0.30.0-tiers", "0.30.0-whole-stack"],
)
def test_a_new_process_hits_what_another_one_has_stored(start, model, tmp_path, version, way):
    config = way(fs(tmp_path / "store"))
    options = {"release": version, "hash_seed": "0"}
    first = start(model, config, **options)
    tokens, cached = first.generate(*PROMPTS)
    assert cached == [0, 0]
    first.shutdown()
    second = start(model, config, **options)
    assert second.generate(*PROMPTS) == (tokens, WHOLE)
    assert second.metrics()["kvtiers_tier_shared{fs}"] == 1
    second.shutdown()


def test_where_block_hashes_are_random_nothing_is_shared_and_one_line_says_what_to_set(start, model, tmp_path):
    config = tiers(fs(tmp_path / "store"))
    engine = start(model, config, release="0.28.0")
    (line,) = engine.lines("nothing is shared")
    assert "set PYTHONHASHSEED" in line
    engine.generate(PROMPTS[0])  # figures come with the steps
    assert engine.metrics()["kvtiers_tier_shared{fs}"] == 0
    engine.shutdown()


def test_the_whole_stack_refuses_a_release_that_it_is_not_for_by_name(start, model):
    with pytest.raises(EngineError) as refused:
        start(model, whole_stack({"type": "memory", "capacity": "64MiB"}), release="0.28.0")
    assert "runs on vLLM 0.30 and 0.32, not on 0.28" in str(refused.value)


@pytest.mark.parametrize("version", ["", *MORE, "0.33.0"])
def test_vllms_own_manager_stores_forgets_and_has_it_back_byte_by_byte(tmp_path, version):
    before = {"PYTHONPATH": str(release_folder(version))} if version else {}
    store = tmp_path / f"contract-{version or 'own'}"
    done = subprocess.run(
        [sys.executable, CONTRACT, store], env=before, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(version or "0.32.0")
