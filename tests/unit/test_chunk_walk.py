"""A chunk's store passes the files that ARCHITECTURE.md counts: the store is made, and the calls are recorded."""

import hashlib
import importlib.util
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import kvtiers
from kvtiers import CacheLayout, KVGroup, KVTensor, ModelIdentity, RequestContext
from kvtiers.scheduler import OffloadScheduler

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
CORE = ROOT / "core/src/kvtiers"
S3 = ("plugins/s3_tier/src/kvtiers_s3/", "libraries/objectstore/src/kvtiers_objectstore/")
ROOMS = ("scheduler", "tiering", "primary", "gpu", "secondary", "host", "layout")
BLOCKS, PAGE = 4, 4096
MOST_FILES = 44
SECONDS = 60.0
# What "value types, figures and what each step does anyway" are, and what the test itself brings.
NOT_COUNTED = {
    "gpu/host_copy.py": "the copier of host memory; a GPU's is counted",
    "host/layout_record.py": "the fingerprint record, written once, beside the first value",
    "host/messages.py": "value types",
    "host/presence.py": "asks what is there already where one question has many names; S3's has one",
    "host/prober.py": "a thread of its own: lookups",
    "host/store_opening.py": "at the start and the end of a pool",
    "host/value_run.py": "value types",
    "layout/fingerprint_record.py": "written once, beside the first value",
    "primary/eviction/base.py": "a policy's hooks that do nothing",
    "scheduler/loads.py": "of each step: loads that ended",
    "secondary/in_process.py": "instead of a host's client and connection, with io: thread",
    "secondary/log_thread.py": "a thread of its own: lines of the log",
    "secondary/supervisor.py": "a thread of its own: watches the host",
    "secondary/tier_counts.py": "figures: of a tier's jobs and values",
    "tiering/estimates.py": "figures: what a step and a load take",
    "tiering/load_or_recompute.py": "of each step: the GPU's queue",
    "tiering/promotion.py": "of each step: reservations",
    "tiering/reports.py": "figures and events",
}
# Of the S3 tier.
NOT_COUNTED_OF_S3 = {
    S3[0] + "bucket.py": "of the fingerprint record, written once, beside the first value",
    S3[0] + "connection.py": "of the fingerprint record, too",
    S3[1] + "requests.py": "figures: requests by kind",
}
# A GPU's need a device; tests/unit/gpu/cuda/test_lane.py makes the same of a played one.
NOT_RUN_HERE = re.compile(r"gpu/cuda/")
# Imported by each interpreter before anything else: writes the file of each call into a file that the test empties.
RECORDER = """
import os, sys, threading
fd, last = os.open({path!r}, os.O_WRONLY | os.O_APPEND), ""
def note(frame, event, _):
    global last
    name = frame.f_code.co_filename
    if event == "call" and name != last and frame.f_code.co_name != "<module>":
        last = name
        os.write(fd, name.encode() + b"\\n")
threading.setprofile(note)
sys.setprofile(note)
"""


def listed() -> tuple[list[str], int]:
    """The files that the document lists, those of core by their path in it, and the number that it gives."""
    _, names, number, _ = next(line for line in TEXT.splitlines() if line.startswith("| files |")).split("|")[1:]
    files = []
    for folder, of_folder in re.findall(r"`([\w/]+/)`: ((?:`[\w/]+`(?:, )?)+)", names):
        files += [f"{folder}{name}.py" for name in re.findall(r"`([\w/]+)`", of_folder)]
    return files, int(number)


def test_the_files_that_a_chunks_store_passes_are_there_and_as_many_as_the_document_says():
    files, number = listed()
    assert [file for file in files if not ((CORE / file).is_file() or (ROOT / file).is_file())] == []
    assert len(set(files)) == len(files) == number <= MOST_FILES
    assert f"A chunk's store passes {number} files from a GPU to S3." in TEXT
    in_memory = sum("gpu/cuda/" not in file and "kvtiers_objectstore" not in file for file in files) + len(
        ["host_copy", "store"]
    )
    assert f"it is {in_memory}:" in TEXT


@pytest.mark.parametrize(("row", "most"), [("forms of a job", 7), ("ledgers of jobs in flight", 3)])
def test_a_job_has_as_many_forms_and_ledgers_as_the_document_says(row, most):
    (line,) = [line for line in TEXT.splitlines() if line.startswith(f"| {row} |")]
    _, which, number, _ = line.split("|")[1:]
    assert len(which.split(";")) == int(number) <= most
    sources = "\n".join(path.read_text("utf-8") for path in CORE.rglob("*.py"))
    named = re.findall(r"`([A-Z]\w+)`", which)
    assert named
    assert [name for name in named if not re.search(rf"^class {name}\b", sources, re.MULTILINE)] == []


class Request:
    """A request of four blocks."""

    def __init__(self) -> None:
        self.context = RequestContext("r", {})
        self.num_tokens = BLOCKS * 16
        self.block_hashes = [[hashlib.sha256(bytes([block])).digest() for block in range(BLOCKS)]]
        self.block_ids = [list(range(BLOCKS))]


class Blocks:
    """An engine that frees no block."""

    def hold(self, block_ids: Sequence[int]) -> None:
        pass

    def release(self, block_ids: Sequence[int]) -> None:
        pass


@contextmanager
def calls_recorded() -> Iterator[set[str]]:
    """Record the files of core's functions that any thread calls."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            files.add(frame.f_code.co_filename)

    threading.setprofile(note)  # of threads that start from now on
    sys.setprofile(note)
    try:
        yield files
    finally:
        threading.setprofile(None)
        sys.setprofile(None)


def files_of_a_store(tier: dict[str, Any], begin: Callable[[], None] = lambda: None) -> set[str]:
    """Store a request's chunks down to this tier; return the files of the calls that this took in this process.

    ``begin`` is called before. Files of core are named by their path in it, others by that in the repository.
    """
    layout = CacheLayout(ModelIdentity("m", weights="w"), (KVGroup("all", 16),), (KVTensor("layer", 0, PAGE),))
    config = {"version": 1, "primary": {"capacity": "1MiB"}, "secondary": [{**tier, "required": True}]}
    until = time.monotonic() + SECONDS
    with calls_recorded() as all_files:
        manager = kvtiers.open_manager(config, layout)
        tensors = [np.ones((BLOCKS, PAGE), np.uint8)]
        worker = kvtiers.open_worker(config, layout, tensors, engine_id=manager.engine_id)
        try:
            manager.wait_ready(SECONDS)
            scheduler = OffloadScheduler(manager, layout, Blocks())
            request = Request()
            scheduler.add_request(request)
            while not manager.stats()["tiers"][tier["type"]]["own"]["open"]:
                assert time.monotonic() < until, "the tier does not open"
                scheduler.end_step()
            manager._look_at = math.inf  # its periodic work is no part of a store, and is due on a slow machine
            begin()
            all_files.clear()
            scheduler.on_computed(request, request.num_tokens)
            transfers = scheduler.end_step()
            for job in transfers.stores:
                worker.submit_store(job.job_id, job.blocks, job.chunk_ids)
            worker.wait([job.job_id for job in transfers.stores])
            scheduler.report(worker.get_finished(), 0)
            while manager.stats()["tiers"][tier["type"]]["stored_chunks"] < BLOCKS:
                assert time.monotonic() < until, "the tier has not stored the chunks"
                scheduler.end_step()
            return {name for file in all_files.copy() if (name := named(file))}
        finally:
            worker.shutdown()
            manager.shutdown(SECONDS)


def named(file: str) -> str:
    """The name of a file as the document has it; none if it is not of the rooms of core, nor of the S3 tier."""
    path = Path(file)
    if path.name == "__init__.py":
        return ""
    if path.is_relative_to(CORE):
        inside = path.relative_to(CORE)
        return inside.as_posix() if inside.parts[0] in ROOMS else ""
    return path.relative_to(ROOT).as_posix() if any(path.is_relative_to(ROOT / place) for place in S3) else ""


@pytest.fixture(scope="module")
def passed(tmp_path_factory) -> set[str]:
    """The files of the rooms that a store passes, in the engine's process and in a tier host's."""
    folder = tmp_path_factory.mktemp("recorder")
    calls = folder / "calls"
    calls.touch()
    (folder / "sitecustomize.py").write_text(RECORDER.format(path=str(calls)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        files = files_of_a_store({"type": "memory", "capacity": "1MiB"}, begin=lambda: os.truncate(calls, 0))
        in_the_host = {name for file in calls.read_text().splitlines() if (name := named(file))}
    return files | in_the_host | files_of_a_store({"type": "memory", "capacity": "1MiB", "io": "thread"})


@pytest.fixture(scope="module")
def passed_to_s3() -> set[str]:
    """The files of the S3 tier that a store passes, with a real server."""
    spec = importlib.util.spec_from_file_location("walk_servers", ROOT / "plugins/s3_tier/tests/servers.py")
    assert spec is not None
    assert spec.loader is not None
    servers = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(servers)
    with servers.moto_server() as endpoint:
        bucket = {"endpoint": endpoint, "bucket": servers.new_bucket(endpoint), "region": "us-east-1"}
        keys = {"access_key": servers.ACCESS_KEY, "secret_key": servers.SECRET_KEY}
        files = files_of_a_store({"type": "s3", **bucket, **keys, "io": "thread"})
    return {file for file in files if file.startswith(S3)}


def test_a_store_calls_every_file_that_the_document_lists(passed):
    of_core = {file for file in listed()[0] if not file.startswith(S3)}
    assert {file for file in of_core if not NOT_RUN_HERE.search(file)} - passed == set()


def test_a_store_calls_no_file_that_the_document_does_not_list(passed):
    assert passed - set(listed()[0]) - set(NOT_COUNTED) == set()


def test_a_store_to_s3_calls_the_files_of_its_tier_that_the_document_lists(passed_to_s3):
    assert passed_to_s3 - set(NOT_COUNTED_OF_S3) == {file for file in listed()[0] if file.startswith(S3)}
