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


MAIN = f"{sys.executable} -c 'from kvtiers.cli.main import main; main()'"


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("command", ["tiers", "--version", "chekc"])
def test_a_command_whose_output_is_closed_ends_as_ever(command, closed):
    done = subprocess.run(["sh", "-c", f"{MAIN} {command} {closed}"], check=False, capture_output=True, text=True)
    assert done.returncode == {"chekc": 2}.get(command, 0)
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= (4 if command == "chekc" else 0)


INSTALLED = """
import sys
sys.path.insert(0, {folder!r})
sys.argv[1:] = [{command!r}]
from kvtiers.cli.main import main
main()
"""


def shown_with(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process with one thread, as a shell does."""
    code = INSTALLED.format(folder=str(folder), command=command)
    return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import time; time.sleep(1000)", "its import has not ended within 3s"),
        ("import os; os._exit(7)", "its import ends the process with exit status 7"),
        ("import os; os.kill(os.getpid(), 9)", "its import ends the process by signal 9"),
        ("import no_such_library", "ModuleNotFoundError"),
    ],
)
def test_the_help_has_a_line_of_each_command_however_broken_its_companion_is(distributions, source, why):
    distributions.install("kvtiers-odd", "[kvtiers.commands]\nodd = MODULE:plugin\n", source=source)
    done = shown_with(distributions.folder, "--help")
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "odd (unusable: command 'odd'" in text
    assert why in text
    assert "warm Fill a running engine's CPU memory" in text


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import os; os._exit(7)", "its import ends the process with exit status 7"),
        ("import no_such_library", "ModuleNotFoundError"),
    ],
)
def test_the_list_of_tiers_has_a_line_of_each_however_broken_it_is(distributions, source, why):
    distributions.install_tier("odd", source)
    done = shown_with(distributions.folder, "tiers")
    assert done.returncode == 1
    assert "tier type 'odd' (kvtiers-odd 1.0)" in done.stdout
    assert why in done.stdout
    assert "memory: a store from kvtiers-example" in done.stdout


@pytest.mark.parametrize("command", ["--help", "tiers"])
def test_an_output_that_cannot_be_written_is_one_line(command):
    code = f"import sys; sys.argv[1:] = [{command!r}]; from kvtiers.cli.main import main; main()"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", code], check=False, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.stderr == "error: the output cannot be written: No space left on device\n"
    assert done.returncode == 1


def main_of(arguments, before):
    """Run the command line in a process that does this before."""
    code = f"{before}\nimport sys; sys.argv[1:] = {arguments!r}; from kvtiers.cli.main import main; main()"
    return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)


def test_a_working_directory_that_was_removed_is_one_line_where_it_is_needed(tmp_path):
    (tmp_path / "tiers.yaml").write_text("version: 1\nprimary: {capacity: 64MiB}\n")
    gone = tmp_path / "gone"
    before = f"import os; os.mkdir({str(gone)!r}); os.chdir({str(gone)!r}); os.rmdir({str(gone)!r})"
    done = main_of(["check", "--offline", "../tiers.yaml"], before)
    assert done.stderr == "error: the working directory has been removed; change to another one\n"
    assert main_of(["check", "--offline", str(tmp_path / "tiers.yaml")], before).returncode == 0


def test_a_limit_on_file_sizes_is_named(tmp_path):
    (tmp_path / "tiers.yaml").write_text("version: 1\nprimary: {capacity: 64MiB}\n")
    before = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))"
    done = main_of(["check", str(tmp_path / "tiers.yaml")], before)
    assert done.returncode == 1
    assert "the limit on file sizes (ulimit -f, LimitFSIZE=) is lower" in done.stdout


def test_memory_that_cannot_be_had_is_one_line():
    before = "from kvtiers.cli import main as m\ndef cli(**_): raise MemoryError\nm.cli = cli"
    done = main_of(["tiers"], before)
    assert done.returncode == 1
    assert done.stderr == "error: no memory to be had: a limit of this process (ulimit -v), or of the machine\n"
