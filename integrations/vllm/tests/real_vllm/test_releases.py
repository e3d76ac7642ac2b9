"""Other releases of vLLM: a smoke where one runs on a CPU; its own manager over a tier, without an engine, for all."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvtiers_replay.logs import Reading, read_log
from kvtiers_vllm.releases import release_of

from .conftest import PROMPTS, WHOLE
from .engines import PATIENCE, EngineError, python_path, release_folder
from .ways import fs, tiers, whole_stack

ENGINE = Path(__file__).parent / "engine"
SEEDED = {"PYTHONHASHSEED": "0"}
"""For releases whose block hashes are random without: vLLM reads it when an engine starts."""


def in_every_release(*versions):
    return [pytest.param(version, marks=pytest.mark.every_release) for version in versions]


def run(script, version, *arguments):
    """Run a script with a release of vLLM, the environment's own by default; return its last line."""
    before = {"PYTHONPATH": python_path(*([str(release_folder(version))] if version else []))}
    done = subprocess.run(
        [sys.executable, ENGINE / script, *arguments],
        env=before,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("version", "way"),
    [
        pytest.param("0.28.0", tiers, id="0.28.0-tiers"),
        pytest.param("0.30.0", tiers, id="0.30.0-tiers"),
        pytest.param("0.30.0", whole_stack, id="0.30.0-whole-stack"),
        pytest.param("0.33.0", tiers, id="0.33.0-tiers"),
        pytest.param("0.33.0", whole_stack, id="0.33.0-whole-stack"),
        pytest.param("0.31.0", tiers, id="0.31.0-tiers", marks=pytest.mark.every_release),
        pytest.param("0.31.0", whole_stack, id="0.31.0-whole-stack", marks=pytest.mark.every_release),
    ],
)
def test_a_new_process_hits_what_another_one_has_stored(start, model, tmp_path, version, way):
    config = way(fs(tmp_path / "store"))
    options = {"release": version, "env": SEEDED}
    first = start(model, config, **options)
    tokens, cached = first.generate(*PROMPTS)
    assert cached == [0, 0]
    first.shutdown()
    second = start(model, config, **options)
    assert second.generate(*PROMPTS) == (tokens, WHOLE)
    assert second.metrics()["kvtiers_tier_shared{fs}"] == 1
    second.shutdown()


@pytest.mark.parametrize("version", ["0.28.0", "0.30.0"])
def test_where_a_salt_is_hashed_without_a_tag_vllms_own_tiering_stores_and_finds_nothing_for_it(
    start, model, tmp_path, version
):
    engine = start(model, tiers(fs(tmp_path / "store")), release=version, env=SEEDED)
    tokens, cached = engine.generate(*PROMPTS, salt="mine")
    assert cached == [0, 0]
    engine.forget()
    assert engine.generate(*PROMPTS, salt="mine") == (tokens, [0, 0])
    engine.forget()
    assert not list((tmp_path / "store").rglob("*00000000"))
    assert engine.generate(*PROMPTS) == (tokens, [0, 0])
    engine.forget()
    assert engine.generate(*PROMPTS) == (tokens, WHOLE), "those without a salt are stored and found"
    engine.shutdown()


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
    assert "runs on vLLM 0.30, 0.31, 0.32 and 0.33, not on 0.28" in str(refused.value)


@pytest.mark.parametrize("version", ["", *in_every_release("0.28.0", "0.29.0", "0.30.0", "0.31.0"), "0.33.0"])
def test_vllms_own_manager_stores_forgets_and_has_it_back_byte_by_byte(tmp_path, version):
    assert run("contract.py", version, tmp_path / f"contract-{version or 'own'}").startswith(version or "0.32.0")


@pytest.mark.parametrize("version", ["", "0.28.0", "0.30.0", *in_every_release("0.29.0", "0.31.0"), "0.33.0"])
def test_requests_of_different_salts_share_no_block_hash_also_where_a_salt_is_hashed_without_a_tag(version):
    found, collide = run("salts.py", version).split()
    assert found.startswith(version or "0.32.0")
    assert (collide == "apart") == release_of(found).tags_salt, "with adapters off nothing else is bare text"


@pytest.mark.parametrize("version", ["", *in_every_release("0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.33.0")])
def test_vllms_own_request_log_is_read_whatever_stands_in_its_prompts(tmp_path, version):
    ids = list(range(200))
    text = "it's \"quoted\" \\n\n\u00e4 Received request x: y details: prompt: 'z', prompt_token_ids: [1]" * 9
    requests = [(text, ids), (None, ids), (text, None), ("other " * 100, None), (text, ids[:150])]
    log = tmp_path / "server.log"
    assert run("request_log.py", version, log, json.dumps(requests)).startswith(version or "0.32.0")
    found = read_log(log, Reading("vllm"))
    assert found.problems == {}
    assert found.texts == 2
    first, second, third, fourth, fifth = found.workload.requests
    assert [each.num_tokens for each in (first, second, fifth)] == [200, 200, 150]
    assert first.block_hashes == second.block_hashes
    assert first.block_hashes[:2] == fifth.block_hashes
    assert third.num_tokens == len(text) // 4
    assert not set(third.block_hashes) & {*first.block_hashes, *fourth.block_hashes}
