"""The recorded conversation trace through the whole stack: prefix hits beside the truth, references/s, wrong bytes.

Every block that comes back, from the primary, a memory tier or a directory tier, is compared byte by byte. The truth: a
leaf-first LRU, one request after the other, full blocks only, on all 12,031 requests (276,491 references, 170,899
unique blocks). ``--quick`` replays the first 3,000 requests, whose truth was computed in the same way. The folder with
the trace is named by KVTIERS_TRACES.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from lib.results import options_of

from kvtiers.config import OffloadConfig, load_config
from kvtiers_replay.results import ReplayResults
from kvtiers_replay.run import ReplayOptions, replay
from kvtiers_replay.trace import read_trace

TRACE = "conversation_trace.jsonl.gz"
VALUE_BYTES = 4096
POINTS = 0.3
QUICK_REQUESTS = 3000


class Case(NamedTuple):
    """Sizes as shares of the trace's unique blocks, and the prefix hits to be expected, in percent of references.

    ``fs``: a directory tier below holds everything.
    """

    primary: float
    secondary: float
    whole: float
    quick: float
    fs: bool = False

    @property
    def name(self) -> str:
        """What this case is called."""
        primary = "unbounded" if self.primary == 1 else f"{self.primary:.0%}"
        memory = f", memory {self.secondary:.0%}" if self.secondary else ""
        return f"primary {primary}{memory}{', fs' if self.fs else ''}"


CASES = [
    Case(0.05, 0.0, 20.2, 5.98),
    Case(0.10, 0.0, 28.8, 13.08),
    Case(0.20, 0.0, 35.8, 22.23),
    Case(1.00, 0.0, 38.2, 32.60),
    Case(0.10, 0.5, 37.8, 30.96),
    Case(0.10, 0.2, 38.2, 32.60, fs=True),
]


def config_for(memory_chunks: int, fs_path: str | None) -> OffloadConfig:
    """Return a config in which no request waits in vain, so that two runs have the same hits."""
    # The tier evicts behind its users' backs: what is believed of it must be young.
    memory = {
        "type": "memory",
        "io": "thread",
        "capacity": memory_chunks * VALUE_BYTES,
        "exists_ttl": "200ms",
    }
    # Twice what there is: what a directory tier evicts is not what this measures.
    fs = {"type": "fs", "path": fs_path, "capacity": 2 * 170_899 * VALUE_BYTES}
    return load_config(
        {
            "version": 1,
            "primary": {"capacity": "1MiB"},
            "secondary": ([memory] if memory_chunks else []) + ([fs] if fs_path else []),
            "lookup_wait": "60s",
            "load_wait": "60s",
        }
    )


def row_of(case: Case, report: ReplayResults, expected: float) -> dict[str, Any]:
    """Return one line of the table."""
    return {
        "name": case.name,
        "hits_percent": 100 * report.prefix_hits / report.references,
        "expected_percent": expected,
        "references": report.references,
        "references_per_s": report.references / report.seconds,
        "seconds": report.seconds,
        "hits": report.hits,
        "wrong_bytes": report.wrong_bytes,
    }


def results(folder: Path, quick: bool) -> dict[str, Any]:
    """Return the figures and the goals."""
    workload = read_trace(folder / TRACE, QUICK_REQUESTS if quick else None)
    unique = len(set().union(*(request.block_hashes for request in workload.requests)))
    rows, goals = [], []
    for case in CASES:
        options = ReplayOptions(VALUE_BYTES - 64, primary_chunks=int(unique * case.primary))
        with tempfile.TemporaryDirectory(prefix="kvtiers-replay-") as fs_path:
            config = config_for(int(unique * case.secondary), fs_path if case.fs else None)
            report = replay(config, workload, options)
        row = row_of(case, report, case.quick if quick else case.whole)
        rows.append(row)
        off = abs(row["hits_percent"] - row["expected_percent"])
        goals += [
            {"name": f"{case.name}: points off the truth", "value": off, "goal": POINTS, "met": off <= POINTS},
            {
                "name": f"{case.name}: wrong bytes",
                "value": report.wrong_bytes,
                "goal": 0,
                "met": report.wrong_bytes == 0,
            },
        ]
    return {"requests": len(workload.requests), "unique_blocks": unique, "rows": rows, "goals": goals}


def show(found: dict[str, Any]) -> None:
    """Print the figures as a table."""
    print(f"  {'':32}{'hits':>8}{'truth':>8}{'refs/s':>10}{'seconds':>9}{'wrong bytes':>13}")
    for row in found["rows"]:
        print(
            f"  {row['name']:32}{row['hits_percent']:7.2f}%{row['expected_percent']:7.2f}%"
            f"{row['references_per_s']:10,.0f}{row['seconds']:9.1f}{row['wrong_bytes']:13,}"
        )
    for goal in found["goals"]:
        if not goal["met"]:
            print(f"{goal['name']}: {goal['value']:.2f}; goal {goal['goal']:g}: MISSED")


def main() -> None:
    options = options_of(__doc__, f"only the first {QUICK_REQUESTS:,} requests").parse_args()
    folder = os.environ.get("KVTIERS_TRACES")
    if not folder:
        print(f"not run: set KVTIERS_TRACES to the folder that holds {TRACE}", file=sys.stderr)
        print(json.dumps({"goals": []}) if options.json else "")
        return
    found = results(Path(folder), options.quick)
    if options.json:
        print(json.dumps(found))
    else:
        show(found)


if __name__ == "__main__":
    main()
