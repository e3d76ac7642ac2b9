"""Processes with and without compression over one directory: what one stores the others find, or miss, and no more."""

import contextlib
import json

import pytest
from click.testing import CliRunner

from kvtiers import ModelIdentity, open_client
from kvtiers.cli.main import cli

LENGTH = 200_000
IDENTITY = ModelIdentity("test/model", weights="w1")
HERE, THERE, BOTH = range(10), range(10, 20), range(20)
ELSEWHERE = """
import numpy as np
from kvtiers import ModelIdentity, open_client

def open_one(config):
    global client
    client = open_client(config, ModelIdentity("test/model", weights="w1"), 200_000, bounce_bytes=1 << 21)

def value(number):
    numbers = np.random.default_rng(number).standard_normal(100_000, np.float32)
    return (numbers.view(np.uint32) >> 16).astype("<u2").view(np.uint8)

def keys(numbers):
    return [number.to_bytes(8, "big") for number in numbers]

def put(numbers):
    return sum(client.put(keys(numbers), [value(number) for number in numbers]).stored)

def get(numbers):
    views = [np.full(200_000, 7, np.uint8) for _ in numbers]
    found = client.get_into(keys(numbers), views)
    for number, view, there in zip(numbers, views, found):
        assert (view == (value(number) if there else 7)).all(), number
    return sum(found)
"""
here = {}
exec(ELSEWHERE, here)
value, keys = here["value"], here["keys"]


@pytest.fixture
def config(tmp_path):
    def config(compression, **options):
        tier = {"type": "fs", "path": str(tmp_path / "fs"), "capacity": "1GiB", "min_free": 0, **options}
        return {
            "version": 1,
            "primary": {"capacity": "1MiB"},
            "start_wait": "60s",
            "secondary": [{**tier, "compression": compression}],
        }

    return config


@pytest.fixture
def opened(start, config):
    """Open clients; each is closed at the end (its hosts: see ``start``)."""
    clients = []

    def opened(compression, **options):
        clients.append(open_client(config(compression, **options), IDENTITY, LENGTH, bounce_bytes=1 << 21))
        return clients[-1]

    yield opened
    for client in clients:
        client.close()


def put(client, numbers):
    return sum(client.put(keys(numbers), [value(number) for number in numbers]).stored)


def get(client, numbers):
    here["client"] = client
    return here["get"](numbers)


def stored_bytes(path):
    return [file.stat().st_size for file in path.rglob("*") if file.is_file() and file.stat().st_size > 4096]


def test_an_engine_with_and_one_without_compression_share_a_directory(opened, party, config, tmp_path, machine):
    there = party()
    there.do(ELSEWHERE + f"\nopen_one({config('none')!r})")
    client = opened("zstd")
    assert (put(client, HERE), there.do(f"put({THERE!r})")) == (10, 10)
    assert max(stored_bytes(tmp_path / "fs")) > LENGTH > 1.35 * min(stored_bytes(tmp_path / "fs"))
    assert get(client, BOTH) == 20, "it reads both kinds"
    assert there.do(f"get({BOTH!r})") == 10, "for the other one a compressed value is a miss"
    assert there.do(f"put({HERE!r})") == 10, "and the next store replaces it"
    assert there.do(f"get({BOTH!r})") == 20
    assert get(client, BOTH) == 20
    machine.wait_until(lambda: client.stats()["tiers"]["fs"].get("compression_values") == 10, "its figures")
    figures = client.stats()["tiers"]["fs"]
    assert figures["compression_value_bytes"] > 1.35 * figures["compression_stored_bytes"]


def test_an_engine_that_only_reads_compressed_values_finds_all_and_writes_what_every_engine_reads(
    opened, party, config
):
    there = party()
    there.do(ELSEWHERE + f"\nopen_one({config('read')!r})")
    client, plain = opened("zstd", io="thread"), opened("none")
    assert (put(client, HERE), there.do(f"put({THERE!r})")) == (10, 10)
    assert there.do(f"get({BOTH!r})") == 20
    assert get(plain, THERE) == 10


def test_values_that_were_stored_by_a_process_that_was_killed_come_back_and_the_command_line_reads_them(
    opened, party, config, tmp_path
):
    there = party()
    there.do(ELSEWHERE + f"\nopen_one({config('zstd')!r})")
    assert there.do(f"put({HERE!r})") == 10
    there.end()
    client = opened("zstd")
    assert get(client, HERE) == 10
    file = tmp_path / "tiers.yaml"
    file.write_text(json.dumps(config("zstd")))
    done = CliRunner().invoke(cli, ["store", "verify", "fs", "--config", str(file), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["ok"]["values"] == 10


def test_values_in_a_clients_region_are_compressed_too(start, config, tmp_path):
    client = open_client(config("zstd"), IDENTITY, LENGTH, bounce_bytes=1 << 21, region_bytes=4 << 20)
    with contextlib.closing(client):
        views = [client.region[number * LENGTH : (number + 1) * LENGTH] for number in HERE]
        for number, view in zip(HERE, views, strict=True):
            view[:] = value(number).tobytes()
        assert all(client.put(keys(HERE), views).stored)
        assert max(stored_bytes(tmp_path / "fs")) < LENGTH / 1.35
        for view in views:
            view[:] = bytes(LENGTH)
        assert all(client.get_into(keys(HERE), views))
        assert all(view == memoryview(value(number).tobytes()) for number, view in zip(HERE, views, strict=True))
        del views, view
