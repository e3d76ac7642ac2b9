"""The documented ways to start vLLM with tiers: with a config that is wrong none of them serves without a cache."""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kvtiers.api import ConfigError
from kvtiers_vllm.engine_args import prepare_engine_args
from kvtiers_vllm.stack.options import VARIABLE

from . import fake_vllm

HERE = Path(__file__).parents[4]
KUBERNETES = [HERE / "examples" / "kubernetes" / name for name in ("vllm.yaml", "vllm-whole-stack.yaml")]
GOOD = """
version: 1
primary: {capacity: 64MiB}
secondary: [{type: memory, capacity: 1MiB}]
"""
BROKEN = {
    "an unknown option": GOOD.replace("capacity: 1MiB", "capactiy: 1MiB"),
    "an unknown tier": GOOD.replace("memory", "memroy"),
    "no YAML": "version: [",
    "nothing": "",
    "no file": None,
}


def commands_in(document):
    """Return the commands in a document's shell blocks that start vLLM, with what they wait for."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)
    command = re.compile(r"^(?:config=.*&&\n)?(?:\w+=\S+ )?vllm serve (?:.*\\\n)*.*$", re.MULTILINE)
    return [found.group() for kind, block in blocks if kind in ("", "sh") for found in command.finditer(block)]


def kubernetes(example):
    """Return an example's command, over a file of this folder."""
    (deployment,) = [item for item in yaml.safe_load_all(example.read_text()) if item["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["bash", "-c"]
    (command,) = container["args"]
    assert "/etc/kvtiers/tiers.yaml" in command
    return command.replace("/etc/kvtiers/tiers.yaml", "tiers.yaml")


COMMANDS = [*commands_in(HERE / "docs" / "vllm.md"), *commands_in(HERE / "integrations" / "vllm" / "README.md")]
COMMANDS += map(kubernetes, KUBERNETES)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Run a command over a file; return the arguments of vLLM's that it ended in, or None where it did not start it."""
    monkeypatch.chdir(tmp_path)
    programs = {
        "kvtiers": f'exec {sys.executable} -c "from kvtiers.cli.main import main; main()" "$@"',
        "vllm": f'exec {sys.executable} -c "{RECORD}" "$@"',
    }
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    path = f"{tmp_path / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin"

    def start(command, text):
        if text is not None:
            Path("tiers.yaml").write_text(text)
        env = {name: value for name, value in os.environ.items() if name != VARIABLE} | {"PATH": path}
        subprocess.run(["bash", "-c", command], env=env, timeout=120, check=False, capture_output=True)
        return json.loads(Path("started").read_text()) if Path("started").exists() else None

    return start


RECORD = f"import json, os, sys; json.dump([sys.argv[1:], os.environ.get('{VARIABLE}')], open('started', 'w'))"


def taken(started, monkeypatch):
    """Return the connector with which vLLM would serve; ConfigError or JSONDecodeError: its start fails."""
    arguments, variable = started
    transfer = None
    if "--kv-transfer-config" in arguments:
        given = arguments[arguments.index("--kv-transfer-config") + 1]
        transfer = json.loads(given)["kv_connector"] if given not in ("", "None") else None  # as vLLM reads it
    elif variable is not None:
        fake_vllm.install(monkeypatch)
        monkeypatch.setenv(VARIABLE, variable)
        args = fake_vllm.EngineArgs()
        prepare_engine_args(args, "0.32.0")
        transfer = args.kv_transfer_config.kv_connector
    return transfer


@pytest.mark.parametrize("command", COMMANDS)
def test_with_a_config_that_holds_vllm_serves_with_its_tiers(start, command, monkeypatch):
    started = start(command, GOOD)
    assert started is not None
    assert taken(started, monkeypatch) in ("OffloadingConnector", "KvtiersConnector")


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("command", COMMANDS)
def test_with_a_config_that_is_wrong_nothing_serves(start, command, broken, monkeypatch):
    started = start(command, BROKEN[broken])
    if started is not None:
        with pytest.raises((ConfigError, json.JSONDecodeError)):
            taken(started, monkeypatch)


@pytest.mark.parametrize("command", [command for command in COMMANDS if VARIABLE not in command])
def test_without_the_command_of_kvtiers_nothing_serves(start, command, tmp_path):
    (tmp_path / "bin" / "kvtiers").unlink()
    assert start(command, GOOD) is None


@pytest.mark.parametrize("broken", BROKEN)
def test_an_argument_without_anything_in_front_of_it_is_refused_as_well(start, broken, monkeypatch):
    """As it was documented before, and as it stands in scripts."""
    command = 'vllm serve MODEL --kv-transfer-config "$(kvtiers vllm-config tiers.yaml --json)"'
    started = start(command, BROKEN[broken])
    assert started is not None
    with pytest.raises(json.JSONDecodeError):
        taken(started, monkeypatch)


def test_every_way_in_is_documented():
    assert sum(VARIABLE in command for command in COMMANDS) >= 2
    assert sum("--whole-stack" in command for command in COMMANDS) == 2
    assert len(COMMANDS) >= 6
