"""The cost of importing kvtiers: milliseconds of a whole interpreter, beside `import numpy` and an empty one.

Each start is a process of its own; the statements take turns, so that a busy machine slows all of them alike. The
first round warms the page cache and the compiled files, and is not counted. Medians.
"""

import statistics
import subprocess
import sys
import time
from typing import Any

from lib.results import options_of, say

STATEMENTS = ("pass", "import kvtiers", "import kvtiers.api", "import numpy")
# Every plugin's entry module imports kvtiers: what it adds must vanish beside what any engine imports anyway.
GOAL_SHARE_OF_NUMPY = 0.25


def start_ms(statement: str) -> float:
    """Return the milliseconds from the start of an interpreter that runs this statement to its end."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return (time.perf_counter() - start) * 1e3


def measure(rounds: int) -> dict[str, float]:
    """Return the median milliseconds by statement."""
    samples: dict[str, list[float]] = {statement: [] for statement in STATEMENTS}
    for number in range(rounds + 1):
        for statement, taken in samples.items():
            milliseconds = start_ms(statement)
            if number:
                taken.append(milliseconds)
    return {statement: statistics.median(taken) for statement, taken in samples.items()}


def results(rounds: int) -> dict[str, Any]:
    """Return the figures and the goals."""
    medians = measure(rounds)
    added = {statement: medians[statement] - medians["pass"] for statement in STATEMENTS[1:]}
    share = added["import kvtiers"] / added["import numpy"]
    goal = {
        "name": "import kvtiers, as a share of import numpy (both above an empty interpreter)",
        "value": share,
        "goal": GOAL_SHARE_OF_NUMPY,
        "met": share <= GOAL_SHARE_OF_NUMPY,
    }
    return {"ms": medians, "ms_above_empty": added, "goals": [goal]}


def report(found: dict[str, Any]) -> None:
    """Print the figures as a table."""
    print(f"  {'statement':22}{'ms':>8}{'above empty':>14}")
    for statement, milliseconds in found["ms"].items():
        print(f"  {statement:22}{milliseconds:8.1f}{found['ms_above_empty'].get(statement, 0.0):14.1f}")


def main() -> None:
    options = options_of(__doc__, "fewer rounds").parse_args()
    found = results(rounds=5 if options.quick else 40)
    say(found, report, as_json=options.json)


if __name__ == "__main__":
    main()
