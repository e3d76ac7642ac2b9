"""The command: runs the acts, says what each has shown, and what to try next."""

import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import click

from demo.acts import ActError
from demo.acts.aside import it_stays_out_of_the_way
from demo.acts.pays import it_pays
from demo.acts.safe import it_is_safe
from demo.acts.shared import it_is_shared
from demo.process import EngineError
from demo.setting import Setting
from demo.table import say


class Act(NamedTuple):
    """An act: its name, what it does, and the function that does it."""

    name: str
    about: str
    run: Callable[[Setting], str]


ACTS = (
    Act(
        "It pays",
        "Questions on long documents, to an engine without kvtiers and to one with it, in turns. Wall-clock seconds\n"
        "  to the first token; the tokens have to be the same.",
        it_pays,
    ),
    Act(
        "It is shared", "A second engine, in a process of its own, finds what the first one has computed.", it_is_shared
    ),
    Act(
        "It is safe",
        "Bits are flipped in every stored value: that must cost time, and change no token. Without the check (the\n"
        "  control; kvtiers has no switch for that) it does change them.",
        it_is_safe,
    ),
    Act(
        "It stays out of the way",
        "A tier's host is stopped, then killed, under an engine that serves; then the engine itself, with kill -9.\n"
        "  Steps with the same work in them, with tiers and without.",
        it_stays_out_of_the_way,
    ),
)
_KVTIERS = Path(sysconfig.get_path("scripts"), "kvtiers")
_NEXT = (
    ("kvtiers check tiers.yaml", "what is wrong with a config, a tier or this machine"),
    ("kvtiers replay --help", "traffic of your own through tiers of your own"),
    ("kvtiers size --model config.json", "what a model's KV takes, and when a load pays"),
    ("kvtiers plan --trace FILE --config tiers.yaml", "which sizes and policies are worth it"),
    ("docs/your-own-engine.md", "what an engine of your own has to do"),
)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--act", "numbers", metavar="N", multiple=True, type=click.IntRange(1, len(ACTS)), help="Only this act.")
@click.option("--quick", is_flag=True, help="A tiny model: everything happens, but gains mean nothing.")
@click.option("--folder", type=click.Path(path_type=Path), help="Values and logs go there, and stay.")
@click.option("--report", metavar="FILE", type=click.Path(path_type=Path), help="Write a replay's report page there.")
@click.pass_obj
def main(
    acts: Sequence[Act] | None, numbers: tuple[int, ...], quick: bool, folder: Path | None, report: Path | None
) -> None:
    """Show on this machine what kvtiers promises: four acts, measured, nothing estimated.

    A transformer in numpy with random weights is the engine. Exit status: 0 every act holds, 1 one does not.
    """
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # engines and folder are tidied up
    try:
        _run(acts or ACTS, numbers, folder, report, quick=quick)
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(
    acts: Sequence[Act], numbers: tuple[int, ...], folder: Path | None, report: Path | None, *, quick: bool
) -> None:
    began = time.perf_counter()
    say("kvtiers in four acts. The engine is a transformer in numpy; all times are measured, here and now.", bold=True)
    place = folder or Path(tempfile.mkdtemp(prefix="kvtiers-demo-"))
    try:
        setting = Setting.quick(place) if quick else Setting(place)
        chosen = sorted(set(numbers)) or range(1, len(acts) + 1)
        failed = [f"act {number}" for number in chosen if not _show(number, acts[number - 1], setting)]
    finally:
        if folder is None:
            shutil.rmtree(place)
    if report is not None and not _write_report(report, 40 if quick else 400):
        failed.append("the report")
    say(f"\nAll that took {time.perf_counter() - began:.0f} s. What to try next (kvtiers is {_KVTIERS}):", bold=True)
    for command, about in _NEXT:
        say(f"  {command:46} {about}")
    if failed:
        say(f"\nFailed: {', '.join(failed)}. With --folder DIR the engines' logs stay, in DIR.", fg="red")
        sys.exit(1)


def _show(number: int, act: Act, setting: Setting) -> bool:
    began = time.perf_counter()
    say(f"\nAct {number}: {act.name}", bold=True)
    say(f"  {act.about}")
    folder = setting.folder / f"act{number}"
    try:
        folder.mkdir(parents=True)
        shown = act.run(replace(setting, folder=folder))
    except (ActError, EngineError, OSError) as failure:
        say(f"  FAILED: {failure}", fg="red", bold=True)
        return False
    say(f"  Holds: {shown}. ({time.perf_counter() - began:.1f} s)", fg="green", bold=True)
    return True


def _write_report(file: Path, requests: int) -> bool:
    say("\nThe report page: talks about source code, replayed through two tiers", bold=True)
    command = [str(_KVTIERS), "replay", "--workload", "code", "--requests", str(requests), "--report", str(file)]
    command += ["--bytes-per-chunk", "64KiB", "--primary-chunks", "500"]  # small, so that it takes seconds
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # its progress is on stderr
    if done.returncode:
        say(f"  FAILED: kvtiers replay: exit status {done.returncode}", fg="red", bold=True)
        return False
    say(f"  {done.stdout.splitlines()[-1]} Open {file.resolve().as_uri()}", fg="green", bold=True)
    return True


if __name__ == "__main__":
    main(prog_name="python -m demo")
