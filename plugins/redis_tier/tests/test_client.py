"""Clients, with real hosts, over a real server: every byte right from several threads and clients, and outages."""

import contextlib
import time

import numpy as np
import pytest

from kvtiers import ModelIdentity, open_client
from kvtiers.testing.running import run_together

PATIENCE = 60.0
LENGTHS = [70_000, 5_000]
IDENTITY = ModelIdentity("test/model", weights="w1")


def value(number):
    return np.random.default_rng(number).integers(0, 256, LENGTHS[number % 2], np.uint8)


def key(number):
    return number.to_bytes(8, "big")


def put(client, numbers, **more):
    return client.put([key(number) for number in numbers], [value(number) for number in numbers], **more)


def get(client, numbers, **more):
    views = [np.full(LENGTHS[number % 2], 7, np.uint8) for number in numbers]
    found = client.get_into([key(number) for number in numbers], views, **more)
    for number, view, there in zip(numbers, views, found, strict=True):
        assert (view == (value(number) if there else 7)).all(), number
    return sum(found)


@pytest.fixture
def opened():
    """Open clients of a server; they are closed at the end."""
    with contextlib.ExitStack() as stack:

        def open_one(server, **options):
            tier = {"type": "redis", "url": server.url, "breaker": {"delay": "50ms", "max_delay": "100ms"}, **options}
            primary = {"capacity": "1MiB"}
            config = {"version": 1, "primary": primary, "start_wait": "60s", "secondary": [tier]}
            return stack.enter_context(open_client(config, IDENTITY, LENGTHS, bounce_bytes=4 << 20))

        yield open_one


def test_threads_of_two_clients_find_each_others_values_byte_for_byte(opened, start):
    server = start()
    clients = [opened(server), opened(server)]

    def work(thread):
        own = range(100 * thread, 100 * thread + 30)
        assert all(put(clients[thread % 2], own).stored)
        assert get(clients[(thread + 1) % 2], own) == 30
        assert clients[thread % 2].exists_prefix([key(number) for number in own[::2]]) == 15

    run_together([lambda thread=thread: work(thread) for thread in range(8)], patience=PATIENCE)


def test_while_the_server_is_gone_calls_end_and_find_nothing_and_afterwards_they_do(opened, start):
    server = start()
    client = opened(server, deadline="5s", connect_timeout="1s")
    assert all(put(client, range(10)).stored)
    server.kill()
    begin = time.monotonic()
    assert get(client, range(10)) == 0
    assert not any(put(client, range(10, 20)).stored)
    assert time.monotonic() - begin < 30
    server.start()
    until = time.monotonic() + PATIENCE
    # It is empty now. What it is still believed to have is not stored until a load has not found it.
    while not (all(put(client, range(10)).stored) and get(client, range(10)) == 10):
        assert time.monotonic() < until, client.stats()
