"""``kvtiers completion``: the scripts, and the answers that they get."""

import os
import shlex
import subprocess
import sys

import pytest
from click.testing import CliRunner

from kvtiers.cli.main import COMMANDS, cli

RUN = "from kvtiers.cli.main import main; main()"


def answers(*words):
    """What kvtiers answers a shell that completes the last word."""
    asked = {"_KVTIERS_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    done = CliRunner().invoke(cli, prog_name="kvtiers", env=asked)
    assert done.exit_code == 0, done.output
    return {line.partition(",")[2] for line in done.output.splitlines()}


def in_bash(script):
    """What this script prints in bash, line by line."""
    done = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_is_of_its_shell_and_asks_kvtiers(shell):
    done = CliRunner().invoke(cli, ["completion", shell])
    assert done.exit_code == 0, done.output
    assert f"_KVTIERS_COMPLETE={shell}_complete" in done.output
    if shell == "bash":
        in_bash(f"{done.output}\ncomplete -p kvtiers")


def test_commands_are_completed_those_of_companions_too_without_an_import_of_them():
    assert {*COMMANDS, "plan", "replay", "size"} <= answers("kvtiers", "")  # an empty word is left out of the words
    assert answers("kvtiers", "st") == {"status", "store"}
    code = f"import sys\ntry:\n    {RUN}\nfinally:\n    print('kvtiers_replay.cli' in sys.modules)"
    asked = {"_KVTIERS_COMPLETE": "bash_complete", "COMP_WORDS": "kvtiers r", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | asked, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.split() == ["plain,replay", "plain,report", "False"], done.stderr


def test_options_and_their_choices_are_completed():
    assert "--kind" in answers("kvtiers", "new-tier", "--")
    assert answers("kvtiers", "new-tier", "x", "--kind", "m") == {"manager"}


def test_a_bench_is_completed_with_the_installed_types_of_tiers_and_with_files():
    found = answers("kvtiers", "bench", "mem")
    assert found == {"memory", "memory-async", "mem"}  # the last one has the shell look for files


def test_bash_itself_completes_a_bench_with_types_and_looks_for_files_where_none_fits(tmp_path):
    kvtiers = tmp_path / "kvtiers"
    kvtiers.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c "{RUN}"\n')
    kvtiers.chmod(0o700)
    script = CliRunner().invoke(cli, ["completion", "bash"]).output
    # compopt is for completions that bash itself has begun.
    asked = 'compopt() { echo compopt "$@"; }; COMP_WORDS=(kvtiers bench %s); COMP_CWORD=2; COMPREPLY=()'
    asked += f'\n_kvtiers_completion {shlex.quote(str(kvtiers))}\nprintf "%%s\\n" "${{COMPREPLY[@]}}"'
    files, *types = in_bash(f"{script}\n{asked % 'mem'}")
    assert files == "compopt -o default"
    assert set(types) == {"memory", "memory-async"}
    assert in_bash(f"{script}\n{asked % 'tiers.y'}") == ["compopt -o default", ""]
