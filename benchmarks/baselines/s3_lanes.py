"""The baselines of the S3 tier: its clients and their peers, as lanes that write and read values."""

import importlib.util
import io
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import obstore
import xxhash
from baselines.lmcache_s3 import LMCacheS3
from botocore.config import Config

from kvtiers.api import OffloadKey
from kvtiers.region.memfd import create_memfd, map_memory
from kvtiers.tiering.jobs import TieringOptions
from kvtiers_objectstore.requests import Requests
from kvtiers_objectstore.values import read_into
from kvtiers_s3.boto3_client import Boto3Client
from kvtiers_s3.config import S3Config
from kvtiers_s3.connection import Connection

ROOT = Path(__file__).resolve().parents[2]
JOB_BYTES = TieringOptions().job_bytes
THREADS = 9
STEP_SECONDS = 0.005  # between two questions to a tier


def load(name: str, file: str) -> Any:
    """Import a module of tests."""
    spec = importlib.util.spec_from_file_location(name, ROOT / file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


servers = load("s3_servers", "plugins/s3_tier/tests/servers.py")
services = load("objectstore_service", "libraries/objectstore/tests/service.py")

Keyed = Callable[[Sequence[OffloadKey]], None]
Lane = tuple[Keyed, Keyed]
"""How a lane writes values under these keys, and reads them back; more than it has rows for, use them in turn."""
Move = Callable[[str, memoryview], object]
Seconds = Callable[[], float]


class Rows:
    """Memory for the values, as the tier's, and threads that each move some of them: as many as the tier has."""

    def __init__(self, nbytes: int, count: int, stack: ExitStack) -> None:
        total = nbytes * count
        fd = create_memfd("kvtiers-s3-lanes", total)
        self._memory = map_memory(fd, total, total)
        os.close(fd)
        view = self._memory.view
        self.views = [view[at : at + nbytes] for at in range(0, total, nbytes)]
        value = os.urandom(nbytes)
        for row in self.views:
            row[:] = value
        # Of its threads a tier keeps one free for loads.
        self._writers = stack.enter_context(ThreadPoolExecutor(THREADS - 1))
        self._readers = stack.enter_context(ThreadPoolExecutor(THREADS))

    def lane(self, write: Move, read: Move) -> Lane:
        """Return how values are moved one by one, some at the same time."""
        return self._each(write, self._writers), self._each(read, self._readers)

    def _each(self, move: Move, pool: ThreadPoolExecutor) -> Keyed:
        def run(keys: Sequence[OffloadKey]) -> None:
            names = [f"bench/{name}" for name in services.NAMES.names(keys)]
            for _ in pool.map(move, names, itertools.islice(itertools.cycle(self.views), len(names))):
                pass

        return run


def boto3_lane(options: S3Config, rows: Rows) -> Lane:
    """Do what its documentation shows."""
    client = boto3.client(
        "s3",
        endpoint_url=options.endpoint,
        region_name="us-east-1",
        aws_access_key_id=servers.ACCESS_KEY,
        aws_secret_access_key=servers.SECRET_KEY,
        # Without these two it does not work with every server: the rest is as it comes.
        config=Config(request_checksum_calculation="when_required", s3={"addressing_style": "path"}),
    )

    def read(key: str, view: memoryview) -> None:
        view[:] = client.get_object(Bucket=options.bucket, Key=key)["Body"].read()

    def write(key: str, view: memoryview) -> None:
        client.put_object(Bucket=options.bucket, Key=key, Body=bytes(view))

    return rows.lane(write, read)


def boto3_tuned_lane(options: S3Config, rows: Rows) -> Lane:
    client = Boto3Client(Connection(options, Requests(0, 0)))
    return rows.lane(
        lambda key, view: client.write(key, view, only_new=False),
        lambda key, view: read_into(client, key, view, 0, len(view)),
    )


def obstore_lane(store: Any, rows: Rows, *, hashes: bool = False) -> Lane:
    """Move values by obstore alone. ``store``: its store for the bucket."""

    def read(key: str, view: memoryview) -> None:
        view[:] = obstore.get(store, key).bytes()
        if hashes:
            xxhash.xxh3_128(view).digest()

    def write(key: str, view: memoryview) -> None:
        if hashes:
            xxhash.xxh3_128(view).digest()
        obstore.put(store, key, view, use_multipart=False)

    return rows.lane(write, read)


def lmcache_lane(options: S3Config, python: str, nbytes: int, count: int, stack: ExitStack) -> tuple[Lane, Seconds]:
    """Return LMCache's connector, and what it takes; LeftOutError with why it cannot be had."""
    keys = servers.ACCESS_KEY, servers.SECRET_KEY
    connector = stack.enter_context(LMCacheS3(python, options.endpoint, keys, nbytes, count))

    def run(way: str, keys: Sequence[OffloadKey]) -> None:
        connector.move(way, [int.from_bytes(key[:8]) for key in keys])

    return (partial(run, "write"), partial(run, "read")), connector.cpu_seconds


def tier_lane(tier: Any) -> Lane:
    """Send jobs to a tier host, for all rows at once, of the size that the manager cuts them to."""
    per_job = max(1, JOB_BYTES // tier.rows.shape[1])
    tier.step_seconds = STEP_SECONDS

    def run(keys: Sequence[OffloadKey], *, is_load: bool) -> None:
        rows = len(tier.rows)
        jobs = [(keys[at : at + per_job], at % rows) for at in range(0, len(keys), per_job)]
        results = tier.run_all(jobs, load=is_load)
        failed = sum(not result.success for result in results)
        assert not failed, f"{failed} of {len(results)} jobs failed"

    return partial(run, is_load=False), partial(run, is_load=True)


def awscrt_lane(options: S3Config, rows: Rows) -> Lane:
    """Keep as many requests in flight as there are threads; its own threads do the work."""
    from awscrt.auth import AwsCredentialsProvider
    from awscrt.http import HttpHeaders, HttpRequest
    from awscrt.io import ClientBootstrap, DefaultHostResolver, EventLoopGroup
    from awscrt.s3 import S3Client, S3RequestTlsMode, S3RequestType, create_default_s3_signing_config

    loops = EventLoopGroup()
    provider = AwsCredentialsProvider.new_static(servers.ACCESS_KEY, servers.SECRET_KEY)
    client = S3Client(
        bootstrap=ClientBootstrap(loops, DefaultHostResolver(loops)),
        region="us-east-1",
        tls_mode=S3RequestTlsMode.DISABLED,
        signing_config=create_default_s3_signing_config(region="us-east-1", credential_provider=provider),
        part_size=16 << 20,
    )
    host = options.endpoint.removeprefix("http://")

    def ask(method: str, key: str, more: Sequence[tuple[str, str]], body: Any, **what: Any) -> None:
        headers = HttpHeaders([("host", host), *more])
        request = HttpRequest(method, f"/{options.bucket}/{key}", headers, body)
        client.make_request(request=request, **what).finished_future.result(60)

    def write(key: str, view: memoryview) -> None:
        length = [("content-length", str(len(view))), ("content-type", "application/octet-stream")]
        ask("PUT", key, length, io.BytesIO(view), type=S3RequestType.PUT_OBJECT)

    def read(key: str, view: memoryview) -> None:
        def arrived(chunk: bytes, offset: int, **_: Any) -> None:
            view[offset : offset + len(chunk)] = chunk

        ask("GET", key, [], None, type=S3RequestType.GET_OBJECT, on_body=arrived)

    return rows.lane(write, read)
