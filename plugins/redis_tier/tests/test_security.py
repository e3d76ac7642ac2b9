"""TLS, users, passwords: who is let in, who is believed, and what is never printed."""

import logging
import re
import socket
import ssl
import threading
import time
import tracemalloc
from pathlib import Path

import pytest
from redis.exceptions import RedisClusterException
from redis_servers import Cluster, Sentinels, Server, Tls, wait_until
from redis_traffic import content_of, read_all, works, write_all

from kvtiers_redis.sockets import stream_of
from kvtiers_redis.store import RedisStore

CANARY = "canary-6b1f"


@pytest.fixture
def secure(tmp_path):
    """Return a function that starts a server with TLS of the test's own."""
    started = []

    def start(**options) -> Server:
        tls = Tls(tmp_path / f"ca{len(started)}", **options)
        started.append(Server(tmp_path / f"tls{len(started)}", tls=tls))
        return started[-1].start()

    yield start
    for server in started:
        server.stop()


def options_for(server, **options):
    tls = server.tls
    user = {"username": "kv", "password": "tier-secret", "prefix": "kv:"}
    return {"tls_ca": tls.ca, "tls_cert": tls.cert, "tls_key": tls.key, **user, **options}


@pytest.fixture
def readme_user():
    """Return the words of the README's ACL for the tier's user, and those that it adds for a Cluster."""
    text = Path(__file__).parents[1].joinpath("README.md").read_text()
    [words] = re.findall(r"^ACL SETUSER kvtiers on >PASSWORD (.*)$", text, re.MULTILINE)
    [more] = re.findall(r"^(`.*) besides for a Cluster", text, re.MULTILINE)
    return words.split(), re.findall(r"`(.*?)`", more)


def refused(tier, url, match, **options) -> str:
    with pytest.raises(RedisStore.transient_errors, match=match) as refusal:
        tier.open(url, **options)
    return str(refusal.value)


def test_a_server_that_another_ca_has_signed_is_not_believed(tier, tls_server, secure):
    other = secure()
    refused(tier, tls_server.url, "CERTIFICATE_VERIFY_FAILED", **options_for(tls_server, tls_ca=other.tls.ca))
    refused(tier, tls_server.url, "CERTIFICATE_VERIFY_FAILED", **options_for(tls_server, tls_ca=None))


def test_a_certificate_for_another_host_is_not_believed_unless_it_is_to_be(tier, secure, names, value, read):
    server = secure(host="DNS:elsewhere.example")
    refused(tier, server.url, "IP address mismatch", **options_for(server))
    store = tier.open(server.url, **options_for(server, tls_check_hostname=False))
    [name] = names(1)
    store.write(name, value(1))
    assert read(store, name) == bytes(value(1))


def test_a_server_that_asks_for_a_clients_certificate_refuses_clients_without_one(tier, tls_server):
    refused(tier, tls_server.url, str(tls_server.port), **options_for(tls_server, tls_cert=None, tls_key=None))


def test_clear_text_to_a_tls_port_fails_in_time(tier, tls_server):
    url = tls_server.url.replace("rediss", "redis")
    refused(tier, url, str(tls_server.port), connect_timeout="1s", timeout="1s")


def test_a_wrong_password_or_user_is_said_so_and_not_printed(tier, tls_server):
    for wrong in ({"password": CANARY}, {"username": "stranger", "password": CANARY}):
        text = refused(tier, tls_server.url, "(?i)username-password pair", **options_for(tls_server, **wrong))
        assert CANARY not in text


def test_a_user_who_may_not_touch_these_keys_is_said_so(tier, tls_server, names, value):
    store = tier.open(tls_server.url, **options_for(tls_server, prefix="other:"))
    with pytest.raises(Exception, match="NOPERM"):
        store.write(names(1)[0], value(1))


def test_a_server_that_wants_a_password_and_gets_none_is_said_so(tier, start):
    server = start(Server, "--requirepass", "x")
    refused(tier, server.url, "Authentication required")


def test_a_password_in_a_file_is_read_again_when_it_has_changed(tier, start, tmp_path, names, value, read):
    server = start()
    server.call("ACL SETUSER", "kv", "on", ">old", "~*", "+@all")
    file = tmp_path / "password"
    file.write_text("old\n")
    store = tier.open(server.url, username="kv", password={"file": str(file)})
    [name] = names(1)
    store.write(name, value(1))
    server.call("ACL SETUSER", "kv", "resetpass", ">new")
    server.call("CLIENT KILL", "USER", "kv")
    with pytest.raises(RedisStore.transient_errors):
        read(store, name)
    file.write_text("new\n")
    assert read(store, name) == bytes(value(1))


def test_a_user_who_is_thrown_out_comes_back_with_the_next_password(tier, start, tmp_path, names, value, read):
    """The server forgets who we are on a living connection; it is not kept."""
    server = start()
    server.call("ACL SETUSER", "kv", "on", ">old", "~*", "+@all")
    file = tmp_path / "password"
    file.write_text("old")
    store = tier.open(server.url, username="kv", password={"file": str(file)})
    [name] = names(1)
    store.write(name, value(1))
    server.call("ACL DELUSER", "kv")
    server.call("ACL SETUSER", "kv", "on", ">new", "~*", "+@all")
    file.write_text("new")
    assert read(store, name) == bytes(value(1))


def test_a_password_comes_from_the_environment_and_is_never_logged(tier, tls_server, monkeypatch, caplog, names, value):
    monkeypatch.setenv("TIER_SECRET", "tier-secret")
    with caplog.at_level(logging.DEBUG):
        store = tier.open(tls_server.url, **options_for(tls_server, password="${TIER_SECRET}"))
        store.write(names(1)[0], value(1))
        store.diagnose(4096)
        store.close()
    assert "tier-secret" not in caplog.text
    assert "tier-secret" not in repr(store.__dict__)


def test_clear_text_to_another_machine_warns_once(tier, caplog, monkeypatch, start):
    monkeypatch.setattr("kvtiers_redis.servers.is_loopback", lambda host: False)
    server = start()
    for _ in range(2):
        tier.open(server.url).exists(["a"])
    assert [record.levelname for record in caplog.records if "clear text" in record.message] == ["WARNING"]


def test_on_this_machine_or_with_tls_there_is_no_warning(tier, caplog, single, tls_server):
    tier.open(single.url)
    tier.open(f"unix://{single.socket}")
    tier.open(tls_server.url, **options_for(tls_server))
    assert not caplog.records


def test_reading_and_writing_with_tls_makes_no_copy_of_a_value(tier, tls_server, names):
    size = 8 << 20
    src, dst = memoryview(bytearray(size)), memoryview(bytearray(size))
    store = tier.open(tls_server.url, **options_for(tls_server))
    [name] = names(1)
    store.write(name, src)
    tracemalloc.start()
    try:
        store.write_many([name] * 2, [[src]] * 2)
        assert all(store.read_many_into([name] * 2, [[dst]] * 2))
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()
        store.delete([name])


def test_what_is_small_between_values_goes_out_in_one_record(tmp_path):
    tls, records = Tls(tmp_path / "ca"), []
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(tls.folder / "server.crt", tls.folder / "server.key")
    near, far = socket.socketpair()

    def serve() -> None:
        with theirs.wrap_socket(far, server_side=True) as peer:
            while record := peer.recv(1 << 16):  # of no more than one
                records.append(record)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    value = bytes(range(250)) * 80
    with ssl.create_default_context(cafile=tls.ca).wrap_socket(near, server_hostname="127.0.0.1") as connected:
        stream = stream_of(connected, 60)
        stream.until = time.monotonic() + 60
        stream.send([b"head", memoryview(value), b"tail", b"head", memoryview(value), b"tail"])
    thread.join(60)
    assert b"".join(records) == b"head" + value + b"tailhead" + value + b"tail"
    assert [len(record) for record in records] == [4, 16384, 3616, 8, 16384, 3616, 4]


def test_the_user_of_the_readme_may_do_all_that_the_tier_does(tier, start, readme_user, names, value, read):
    server = start()
    words, _ = readme_user
    server.call("ACL SETUSER", "kvtiers", "on", ">x", *words)
    options = {"username": "kvtiers", "password": "x", "prefix": "kv:", "ttl": "1h", "refresh_ttl": True}
    store = tier.open(f"{server.url}/3", set_nx=True, **options)
    [name] = names(1)
    store.write(name, value(1))
    store.write(name, value(2, 2))
    assert read(store, name, 2) == bytes(value(2, 2))
    assert [entry.name for entry in store.list("ns/")] == [name]
    assert "permitted" not in str(store.diagnose(4096))
    store.delete([name])
    assert list(store.exists([name])) == [False]
    assert not server.call("ACL LOG"), "nothing was refused"


def test_a_cluster_with_tls_lets_in_the_user_of_the_readme(tier, tmp_path, start, readme_user, names):
    cluster = start(Cluster, tls=Tls(tmp_path / "ca", ask_clients=True))
    words, more = readme_user
    for node in cluster.nodes:
        node.call("ACL SETUSER", "kv", "reset", "on", ">tier-secret", *words, *more)
    store = tier.open(cluster.url, topology="cluster", **options_for(cluster.nodes[0]))
    many = names(30)
    assert all(write_all(store, many))
    assert read_all(store, many) == [content_of(name) for name in many]
    assert sorted(entry.name for entry in store.list("ns/")) == sorted(many)
    assert not any(node.call("ACL LOG") for node in cluster.nodes), "nothing was refused"


def test_a_cluster_that_only_the_system_trusts_is_sent_no_password(tier, tmp_path, start, monkeypatch):
    cluster, other = start(Cluster, masters=1, tls=Tls(tmp_path / "ca")), Tls(tmp_path / "other")
    node = cluster.nodes[0]
    monkeypatch.setenv("SSL_CERT_FILE", str(node.tls.ca))  # what the system trusts
    options = options_for(node, topology="cluster", username="admin", password="secret")
    with pytest.raises(RedisClusterException, match="CERTIFICATE_VERIFY_FAILED"):
        tier.open(cluster.url, **{**options, "tls_ca": other.ca})
    assert "cmdstat_cluster|slots" not in node.info("commandstats"), "it was not even asked for its slots"
    tier.open(cluster.url, **{**options, "tls_ca": None})


def test_sentinels_with_tls_and_a_user_of_their_own_are_asked_also_after_a_failover(tier, tmp_path, start, names):
    sentinels = start(Sentinels, tls=Tls(tmp_path / "ca", ask_clients=True))
    file = tmp_path / "watcher"
    file.write_text("watch-secret\n")
    options = options_for(sentinels.master, topology="sentinel", master=sentinels.name, sentinel_username="watcher")
    refused(tier, sentinels.url, "(?i)no master found|username-password", **options, sentinel_password=CANARY)
    store = tier.open(sentinels.url, **options, sentinel_password={"file": str(file)})
    many = names(4)
    assert all(write_all(store, many))
    sentinels.sentinels[0].call("SENTINEL FAILOVER", sentinels.name)
    wait_until(lambda: sentinels.master.has_role("slave"), "the master is a replica now")
    wait_until(lambda: works(store, many), "the tier writes to the new one")
