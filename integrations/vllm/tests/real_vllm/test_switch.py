"""``KVTIERS_CONFIG``, the old spelling, and configs that are wrong: what a user's start does, with the real vLLM."""

import subprocess
import sys

import pytest
import yaml

from kvtiers_vllm.cli import NO_CONFIG

from .conftest import AUTO, PROMPTS, WHOLE
from .engines import PATIENCE, EngineError, environment
from .ways import fs, tiers, whole_stack


@pytest.fixture
def file(tmp_path):
    """The whole stack's config, over a store."""
    path = tmp_path / "tiers.yaml"
    path.write_text(yaml.safe_dump(whole_stack(fs(tmp_path / "store"))["kvtiers_config"]))
    return path


@pytest.mark.parametrize("release", ["", pytest.param("0.30.0", marks=pytest.mark.every_release), "0.33.0"])
def test_the_variable_alone_switches_the_whole_stack_on_and_one_line_says_what_is_on(start, model, file, release):
    options = {"release": release, "env": {"KVTIERS_CONFIG": str(file)}}
    first = start(model, **options)
    tokens, cached = first.generate(*PROMPTS)
    assert cached == [0, 0]
    (line,) = first.lines("is on, as the whole stack in vLLM")
    tiers = ("tiers: fs", "namespace 'default'", "shared since 20")
    for words in (f"by KVTIERS_CONFIG={file}", "primary 63.9MiB in 496 rows", *tiers):
        assert words in line
    first.shutdown()
    second = start(model, **options)
    assert second.generate(*PROMPTS) == (tokens, [len(prompt) // AUTO * AUTO for prompt in PROMPTS])
    second.shutdown()


def test_an_explicit_argument_wins_over_the_variable(start, model, file, tmp_path):
    engine = start(model, tiers(fs(tmp_path / "other")), env={"KVTIERS_CONFIG": str(file)})
    (line,) = engine.lines("is not used")
    assert f"KVTIERS_CONFIG={file} is not used: --kv-transfer-config is given, and wins" in line
    assert not engine.lines("is on, as the whole stack in vLLM")
    engine.shutdown()


def test_a_wrong_file_stops_the_start_before_a_model_is_loaded(start, model, file):
    file.write_text(file.read_text().replace("fs", "fz"))
    with pytest.raises(EngineError) as refused:
        start(model, env={"KVTIERS_CONFIG": str(file)})
    (line,) = str(refused.value).splitlines()
    assert "KVTIERS_CONFIG: " in line
    assert "unknown tier type 'fz'" in line


def test_the_old_spelling_works_for_one_release_and_one_line_says_what_to_write(start, model, tmp_path, right):
    old = {"spec_name": "KvtiersOffloadingSpec", **whole_stack(fs(tmp_path / "store"))}
    engine = start(model, old)
    assert right(engine, *PROMPTS) == [0, 0]
    engine.forget()
    assert right(engine, *PROMPTS) == WHOLE
    (line,) = engine.lines("old spelling")
    assert "KvtiersConnector" in line
    engine.shutdown()


def test_a_load_that_a_step_waits_for_is_refused(start, model):
    with pytest.raises(EngineError, match="sync_load_budget_bytes: a load within a step cannot fail"):
        start(model, whole_stack({"type": "memory", "capacity": "64MiB"}, sync_load_budget_bytes=1 << 20))


def test_what_is_printed_where_there_is_no_config_stops_vllms_server(model):
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    done = subprocess.run(
        [*command, "--kv-transfer-config", NO_CONFIG],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode != 0
    assert "--kv-transfer-config" in done.stderr
    assert NO_CONFIG in done.stderr


def test_the_whole_stack_is_refused_as_one_of_several_connectors(start, model):
    one = {
        "kv_connector": "KvtiersConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": whole_stack({"type": "memory", "capacity": "64MiB"}),
    }
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [one]},
    }
    with pytest.raises(EngineError, match="KvtiersConnector does not run under MultiConnector"):
        start(model, kv_transfer_config=several)
