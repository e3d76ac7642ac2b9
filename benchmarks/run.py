"""Run the benchmarks, each in a process of its own, and print their goals.

Every script in this folder prints one JSON object with `--json`; `goals` in it is a list of
`{"name", "value", "goal", "met"}`. A missed goal is a line, not a failure: the machine may be a busy one. A benchmark
that breaks is a failure.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent


def scripts(names: list[str]) -> list[Path]:
    """Return the benchmarks of these names, or all of them."""
    known = {path.stem: path for path in sorted(FOLDER.glob("*.py")) if path.stem != "run"}
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"error: no benchmark {unknown[0]!r}; there are: {', '.join(known)}")
    return [known[name] for name in names or known]


def run_one(script: Path, *, quick: bool) -> dict[str, Any]:
    """Return the benchmark's JSON object, or `{"error": ...}`; what it says on stderr is shown as it comes."""
    command = [sys.executable, str(script), "--json", *(["--quick"] if quick else [])]
    start = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    taken = time.perf_counter() - start
    if done.returncode:
        return {"error": f"exit status {done.returncode}", "seconds": taken, "goals": []}
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        return {"error": f"stdout is not one JSON object: {error}", "seconds": taken, "goals": []}
    return {"goals": [], **found, "seconds": taken}


def goal_line(goal: dict[str, Any]) -> str:
    """Return one line for one goal."""
    return f"  {'met   ' if goal['met'] else 'MISSED'} {goal['name']}: {goal['value']:.4g} (goal {goal['goal']:.4g})"


def report(name: str, found: dict[str, Any]) -> None:
    """Print what came of one benchmark."""
    print(f"{name} ({found['seconds']:.0f} s)")
    if "error" in found:
        print(f"  error: {found['error']}")
    for goal in found["goals"]:
        print(goal_line(goal))
    if not found["goals"] and "error" not in found:
        print("  states no goals")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="which benchmarks (all)")
    parser.add_argument("--quick", action="store_true", help="a first look instead of figures to quote")
    parser.add_argument("--json", action="store_true", help="print one JSON object: each benchmark's own, by name")
    options = parser.parse_args()
    everything = {}
    for script in scripts(options.names):
        everything[script.stem] = found = run_one(script, quick=options.quick)
        if not options.json:
            report(script.stem, found)
    goals = [goal for found in everything.values() for goal in found["goals"]]
    broken = [name for name, found in everything.items() if "error" in found]
    if options.json:
        print(json.dumps(everything))
    else:
        print(f"{sum(goal['met'] for goal in goals)} of {len(goals)} goals met, {len(broken)} benchmarks failed")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
