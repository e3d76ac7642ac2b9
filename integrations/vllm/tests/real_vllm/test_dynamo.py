"""KV events, indexed by Dynamo's own indexer: which blocks its router finds in which place of a worker."""

import contextlib
import json
import subprocess
import sys
import time
import urllib.request

import pytest

from kvtiers.api import make_offload_key
from kvtiers.config import EventsConfig, load_config
from kvtiers.kv_events.naming import GroupFacts
from kvtiers.kv_events.publisher import EventPublisher
from kvtiers.testing.ports import free_port
from kvtiers.types import ChunkBlocks, OffloadEvent

from .engines import PATIENCE, wait_until

BLOCK, PER_CHUNK = 16, 2
TOKENS = list(range(1000, 1000 + 6 * BLOCK))
HASHES = [bytes([number]) * 32 for number in range(1, 7)]
CHUNKS = [
    ChunkBlocks(
        make_offload_key(HASHES[first + 1], 0),
        HASHES[first : first + PER_CHUNK],
        HASHES[first - 1] if first else None,
        TOKENS[first * BLOCK : (first + PER_CHUNK) * BLOCK],
        None,
    )
    for first in range(0, len(HASHES), PER_CHUNK)
]
TIERS = [
    {"type": "fs", "path": "/var/cache/kvtiers", "capacity": "1GiB"},
    {"type": "s3", "bucket": "bucket", "region": "us-east-1"},
]


class Indexer:
    """Dynamo's indexer as a process, with one worker: this publisher."""

    def __init__(self, folder, **options):
        endpoint, self._port = f"tcp://127.0.0.1:{free_port()}", free_port()
        tiers = load_config({"version": 1, "primary": {"capacity": "1MiB"}, "secondary": TIERS}).secondary
        groups = [GroupFacts(0, BLOCK, "full_attention")]
        self.publisher = EventPublisher(EventsConfig(endpoint=endpoint, bind=True, **options), groups, tiers, 0)
        command = ["-m", "dynamo.indexer", "--block-size", BLOCK, "--port", self._port, "--model-name", "tiny"]
        command += ["--workers", f"1={endpoint}"]
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen([sys.executable, *map(str, command)], stdout=log, stderr=log)
        self.publisher.describe(CHUNKS)
        wait_until(self._is_up, "the indexer does not answer")

    def _is_up(self):
        with contextlib.suppress(OSError):
            self._ask("/health")
            return True
        time.sleep(0.05)
        return False

    def _ask(self, path, **body):
        content = json.dumps(body).encode() if body else None
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}", content, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return answer.read()

    def take(self, chunks, *, removed=False, tier=""):
        self.publisher.take([OffloadEvent([chunk.key for chunk in chunks], removed, tier)])

    def found(self):
        """Return how many tokens of the prompt it finds, in host memory and in host memory or on disk."""
        worker = json.loads(self._ask("/query", token_ids=TOKENS, model_name="tiny"))["instances"].get("1", {})
        return worker.get("cpu", 0), worker.get("disk", 0)

    def until(self, tokens, chunks=()):
        """Wait until it finds as much; store these again meanwhile, since a subscriber misses what came before it."""

        def holds():
            if chunks:
                self.take(chunks)
            time.sleep(0.05)
            return self.found() == tokens

        wait_until(holds, f"it finds {self.found()} instead of {tokens}")

    def close(self):
        self._process.kill()
        self._process.wait(PATIENCE)
        self.publisher.close(1.0)


@pytest.fixture
def indexer(tmp_path):
    made = []

    def make(**options):
        made.append(Indexer(tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_it_finds_what_is_in_the_primary_and_in_a_tier_of_the_machine_and_no_longer_what_has_left(indexer, encoding):
    one = indexer(encoding=encoding, ownership=False)
    one.until((96, 96), CHUNKS)
    one.take(CHUNKS, tier="fs")
    one.take(CHUNKS[2:], removed=True)
    one.until((64, 96))
    one.take(CHUNKS[1:], removed=True, tier="fs")
    one.until((64, 64))
    one.publisher.cleared()
    one.until((0, 0))


@pytest.mark.parametrize(("options", "tier"), [({"ownership": False}, "s3"), ({}, "fs")])
def test_it_leaves_out_what_others_share_and_where_events_name_the_tier_all_tiers(indexer, options, tier):
    one = indexer(**options)
    one.until((96, 96), CHUNKS)
    one.take(CHUNKS, tier=tier)
    one.take(CHUNKS[2:], removed=True)
    one.until((64, 64))
