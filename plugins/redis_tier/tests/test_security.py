"""TLS, users, passwords: who is let in, who is believed, and what is never printed."""

import logging
import tracemalloc

import pytest
from redis_servers import Server, Tls

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


def test_a_server_that_asks_for_a_clients_certificate_lets_nobody_in_without(tier, tls_server):
    refused(tier, tls_server.url, str(tls_server.port), **options_for(tls_server, tls_cert=None, tls_key=None))


def test_clear_text_to_a_tls_port_fails_in_time(tier, tls_server):
    url = tls_server.url.replace("rediss", "redis")
    refused(tier, url, str(tls_server.port), connect_timeout="1s", timeout="1s")


def test_a_wrong_password_or_user_is_said_so_and_not_printed(tier, tls_server):
    for wrong in ({"password": CANARY}, {"username": "nobody", "password": CANARY}):
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


def test_clear_text_to_another_machine_warns_once(tier, caplog, monkeypatch, single):
    monkeypatch.setattr("kvtiers_redis.plugin.is_loopback", lambda host: False)
    store = tier.open(single.url)
    store.exists(["a"])
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
        store.write_many([name] * 2, [src] * 2)
        assert all(store.read_many_into([name] * 2, [dst] * 2))
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()
        store.delete([name])
