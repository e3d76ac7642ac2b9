"""The command itself: help without imports, errors as lines, exit statuses."""

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvtiers._version import __version__
from kvtiers.api import ConfigError, TierPluginError
from kvtiers.cli.main import COMMANDS, Lazy, LazyGroup


def loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def test_importing_kvtiers_loads_no_command_line():
    assert not loaded_by("import kvtiers") & {"click", "rich", "kvtiers.cli", "yaml", "pydantic", "torch"}


def test_the_help_imports_no_command():
    loaded = loaded_by("from kvtiers.cli.main import cli\ntry: cli(['--help'])\nexcept SystemExit: pass")
    assert "click" in loaded
    assert not loaded & {
        "kvtiers.cli.check.commands",
        "kvtiers.cli.tiers",
        "kvtiers_replay.cli.replay",
        "kvtiers.config",
        "rich",
        "yaml",
    }


def test_commands_that_ask_an_engine_load_nothing_of_one():
    loaded = loaded_by("import kvtiers.cli.status, kvtiers.cli.top, kvtiers.cli.ctl")
    assert "kvtiers.control" in loaded
    assert not loaded & {"numpy", "kvtiers.tiering.manager", "kvtiers.primary", "kvtiers.secondary"}


def test_the_help_lists_every_command(run):
    result = run("--help")
    assert result.exit_code == 0
    for name, command in COMMANDS.items():
        assert f"  {name} " in result.output
        assert command.help.split()[0] in result.output
    assert "Examples:" in result.output


@pytest.mark.parametrize("command", ["check", "replay", "tiers"])
def test_each_commands_help_has_examples_and_exit_statuses(run, command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"  kvtiers {command} " in result.output
    assert "Exit status:" in result.output


def test_the_version_is_printed(run):
    first, *others = run("--version").output.splitlines()
    assert first == f"kvtiers {__version__}"
    assert re.search(r"^kvtiers-example \S+: tier memory, memory-async$", "\n".join(others), re.MULTILINE)
    assert re.search(r"^kvtiers-replay \S+: command .*\bplan, replay, size$", "\n".join(others), re.MULTILINE)
    assert others == sorted(others)


def test_the_installed_command_runs(process):
    done = process("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"kvtiers {__version__}\n")


def test_an_unknown_command_is_refused_with_status_2(run):
    result = run("chekc")
    assert result.exit_code == 2
    assert "No such command 'chekc'" in result.stderr


def group_that_raises(error: BaseException) -> click.Group:
    group = LazyGroup("kvtiers", lazy={"fail": Lazy("unused:unused", "")})

    @click.command()
    def fail() -> None:
        raise error

    group.get_command = lambda ctx, name: fail
    return group


@pytest.mark.parametrize(
    ("error", "status", "lines"),
    [
        (ConfigError(["a.yaml: one", "a.yaml: two"]), 2, "error: a.yaml: one\nerror: a.yaml: two\n"),
        (TierPluginError("tier type 'x' is broken"), 2, "error: tier type 'x' is broken\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_what_goes_wrong_is_said_in_lines_without_a_traceback(error, status, lines):
    result = CliRunner().invoke(group_that_raises(error), ["fail"])
    assert (result.exit_code, result.stderr, result.stdout) == (status, lines, "")


@pytest.mark.parametrize("command", ["--help", "tiers"])
def test_an_output_that_cannot_be_written_is_one_line(command):
    code = f"import sys; sys.argv[1:] = [{command!r}]; from kvtiers.cli.main import main; main()"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", code], check=False, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.stderr == "error: the output cannot be written: No space left on device\n"
    assert done.returncode == 1
