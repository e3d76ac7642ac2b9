"""The tier in hosts of its own, as an engine has it."""

import socket
import threading
import time

import pytest
from redis_hosted import hosted

from kvtiers_redis.config import RedisConfig


@pytest.fixture
def hangs_up():
    """A port whose connections are closed at once, and a function that says how many there have been."""
    made = 0
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        nonlocal made
        while True:
            try:
                connected, _ = listener.accept()
            except OSError:
                return
            made += 1
            connected.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.getsockname()[1], lambda: made
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(10)


def test_clear_text_to_another_machine_warns_once_however_many_hosts_try_however_often(hangs_up, caplog):
    port, made = hangs_up
    # No loopback address as they are written, though it leads to this machine.
    url = f"redis://0.0.0.0:{port}"
    config = RedisConfig(type="redis", url=url, processes=2, breaker={"delay": "20ms", "max_delay": "20ms"})
    with hosted(config) as tier:
        tier.step_until(lambda: made() >= 20, "both hosts have tried to open their stores several times")
    assert sum("clear text" in record.getMessage() for record in caplog.records) == 1


def test_a_host_has_no_more_connections_than_threads_and_one_for_questions(start):
    server, threads = start(), 4
    config = RedisConfig(type="redis", url=server.url, threads=threads, processes=1)
    with server.client() as client, hosted(config) as tier:
        connections = lambda: len(client.client_list()) - 1  # noqa: E731
        tier.wait_open()
        client.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")  # a store that has begun goes on
        for _ in range(4 * threads):
            tier.store(4)

        def all_are_in_use() -> bool:
            tier.ask()  # each time: a question that is answered before the stores begin leaves them its connection
            return connections() >= threads

        tier.step_until(all_are_in_use, "stores and questions are in flight")
        until = time.monotonic() + 0.3
        tier.step_until(lambda: time.monotonic() > until, "more connections have had time to come")
        assert connections() <= threads + 1
        client.execute_command("CLIENT", "UNPAUSE")
        tier.step_until(tier.all_ended, "the jobs have ended")
        assert connections() <= threads + 1


def test_core_tries_again_after_a_connection_was_cut_in_the_middle_of_a_call(start):
    server = start()
    config = RedisConfig(type="redis", url=server.url, processes=1)
    with server.client() as client, hosted(config) as tier:
        tier.wait_open()
        client.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
        tier.store(4)
        tier.step_until(lambda: client.info("clients")["blocked_clients"], "the server has the call")
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        client.execute_command("CLIENT", "UNPAUSE")
        tier.step_until(tier.all_ended, "the job has ended")
        assert tier.successes == 1
        assert tier.figure("retries") >= 1


def test_a_server_that_is_full_and_evicts_nothing_is_said_once_with_what_to_set(start, caplog):
    server = start()
    server.call("CONFIG", "SET", "maxmemory-policy", "noeviction")
    server.call("CONFIG", "SET", "maxmemory", 1)
    config = RedisConfig(type="redis", url=server.url, processes=1)
    with hosted(config) as tier:
        tier.wait_open()
        tier.step_until(lambda: bool(tier.figure("open")), "the tier is open")
        for _ in range(8):
            tier.store(4)
            tier.step_until(tier.all_ended, "all stores have ended")
        assert tier.figure("full") == 1
        assert tier.figure("dropped_full") == 32
        assert tier.figure("breaker_state") == 0
    (line,) = [record.getMessage() for record in caplog.records if ": full: " in record.getMessage()]
    assert "4 values" in line
    assert "raise the server's maxmemory, or set its maxmemory-policy to allkeys-lru" in line
