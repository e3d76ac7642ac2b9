"""Traces to replay: one that is made up here, and the recorded ones where there are any."""

import json
import os
import random
from pathlib import Path

import pytest

from kvtiers.region.region import SharedOffloadRegion
from kvtiers_replay.engine import task
from kvtiers_replay.trace import read_trace
from kvtiers_replay.workload import Workload

TRACES = "KVTIERS_TRACES"


def synthetic_trace(requests: int, seed: int) -> list[dict]:
    """Conversations that grow and sometimes branch, over a few shared beginnings: lines of a Mooncake trace."""
    chance = random.Random(seed)
    talks = [[f"system {number}", f"system {number}.1"] for number in range(4)]
    beginnings = list(talks)
    lines = []
    for number in range(requests):
        if chance.random() < 0.3:
            talk = list(chance.choice(beginnings))
            talks.append(talk)
        else:
            talk = chance.choice(talks[-25:])
            if chance.random() < 0.2:
                talk = talk[: chance.randrange(1, len(talk) + 1)]
                talks.append(talk)
        talk += [f"{number}.{turn}" for turn in range(chance.randrange(1, 12))]
        del talk[60:]
        tokens = len(talk) * 512 + chance.randrange(1, 512)
        ids = [*talk, "not full"]
        lines.append({"timestamp": number * 100, "input_length": tokens, "output_length": 1, "hash_ids": ids})
    return lines


@pytest.fixture(scope="session")
def trace_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "synthetic.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in synthetic_trace(400, seed=5)), encoding="utf-8")
    return path


@pytest.fixture
def conversation_trace() -> Path:
    folder = os.environ.get(TRACES)
    if not folder:
        pytest.skip(f"{TRACES} is not set")
    return Path(folder) / "conversation_trace.jsonl.gz"


@pytest.fixture
def workload(trace_file) -> Workload:
    return read_trace(trace_file, limit=150)


@pytest.fixture
def regions(monkeypatch) -> list:
    """The regions that replays in this process make."""
    made, create = [], SharedOffloadRegion.create

    def create_and_note(*args, **kwargs):
        made.append(create(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(SharedOffloadRegion, "create", create_and_note)
    return made


@pytest.fixture
def managers(monkeypatch) -> list:
    """The managers that replays in this process open."""
    opened = []
    open_manager = task.kvtiers.open_manager

    def open_and_note(*args, **kwargs):
        opened.append(open_manager(*args, **kwargs))
        return opened[-1]

    monkeypatch.setattr(task.kvtiers, "open_manager", open_and_note, raising=False)
    return opened
