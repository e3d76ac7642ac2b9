"""What ``kvtiers check`` reports about a server, each with what to do about it."""

import pytest
import redis
from redis_servers import Cluster

MIB = 1 << 20


def the(level: str, part: str, found) -> str:
    [finding] = [finding for finding in found if part in finding.text]
    assert finding.level == level, finding
    assert level == "ok" or finding.fix
    return finding.text


@pytest.fixture
def server(start):
    """A server set up as a cache should be."""
    server = start()
    server.call("CONFIG SET", "maxmemory", 1 << 30)
    server.call("CONFIG SET", "maxmemory-policy", "allkeys-lru")
    return server


def found_on(tier, server, value_bytes=2 * MIB, **options):
    return tier.open(server.url, **options).diagnose(value_bytes)


def test_a_server_set_up_as_a_cache_has_only_good_findings(tier, server):
    found = found_on(tier, server)
    assert {finding.level for finding in found} == {"ok"}
    assert "redis 7." in the("ok", ", master, ", found)
    the("ok", "of 1GiB used", found)
    the("ok", "maxmemory-policy allkeys-lru", found)
    the("ok", "writes nothing to its disk", found)
    the("ok", "stays on this machine", found)


def test_valkey_is_called_by_its_name(tier, valkey_server):
    assert "valkey 9." in the("ok", ", master, ", found_on(tier, valkey_server))


@pytest.mark.parametrize(
    ("setting", "value", "level", "part"),
    [
        ("maxmemory-policy", "noeviction", "warning", "maxmemory-policy noeviction: once it is full"),
        ("maxmemory-policy", "volatile-lru", "warning", "evicts nothing that has no 'ttl'"),
        ("maxmemory", 0, "warning", "no maxmemory"),
        ("maxmemory", 12 * MIB, "warning", "has room for 5 values of 2MiB"),
        ("proto-max-bulk-len", 1 * MIB, "error", "proto-max-bulk-len 1MiB refuses values of 2MiB"),
        ("client-query-buffer-limit", 1 * MIB, "error", "client-query-buffer-limit 1MiB refuses"),
        ("client-output-buffer-limit", "normal 3mb 0 0", "warning", "closes connections that read 2MiB at a time"),
        ("client-output-buffer-limit", "normal 0 1mb 10", "warning", "closes connections that read 2MiB at a time"),
        ("client-output-buffer-limit", "normal 1mb 0 0", "error", "closes connections that read 2MiB at a time"),
        ("client-output-buffer-limit", "normal 2mb 0 0", "error", "closes connections that read 2MiB at a time"),
        ("client-output-buffer-limit", "normal 0 2mb 10", "warning", "closes connections that read 2MiB at a time"),
        ("save", "60 1", "warning", "save '60 1': saving gigabytes"),
        ("appendonly", "yes", "warning", "appendonly yes: saving gigabytes"),
    ],
)
def test_a_setting_that_would_hurt_is_named(tier, server, setting, value, level, part):
    server.call("CONFIG SET", setting, value)
    found = found_on(tier, server)
    the(level, part, found)
    assert [finding.level for finding in found].count("ok") == len(found) - 1


def test_what_a_finding_says_to_set_mends_it(tier, server):
    server.call("CONFIG SET", "proto-max-bulk-len", MIB)
    [fix] = [finding.fix for finding in found_on(tier, server) if finding.level == "error"]
    server.call(*fix.split())
    assert {finding.level for finding in found_on(tier, server)} == {"ok"}


def test_with_a_ttl_a_volatile_policy_evicts(tier, server):
    server.call("CONFIG SET", "maxmemory-policy", "volatile-ttl")
    the("ok", "maxmemory-policy volatile-ttl", found_on(tier, server, ttl="1h"))


def test_a_save_that_failed_is_reported(tier, server):
    server.call("CONFIG SET", "save", "1 1")
    (server.folder / "dump.rdb").mkdir()  # what cannot be replaced by a file
    with server.client() as client:
        client.bgsave()
        while client.info("persistence")["rdb_bgsave_in_progress"]:
            pass
    the("warning", "its last save to disk failed", found_on(tier, server))


def test_a_replica_takes_no_writes(tier, server, start):
    replica = start()
    replica.call("REPLICAOF", "127.0.0.1", server.port)
    the("error", "is a replica, which takes no writes", found_on(tier, replica))
    found = tier.open(replica.url, read_only=True).diagnose(2 * MIB)
    assert "error" not in {finding.level for finding in found}


def test_a_node_of_a_cluster_wants_the_clusters_topology(tier, shared_cluster):
    found = found_on(tier, shared_cluster.nodes[0])
    the("error", "is a node of a Cluster", found)


def test_every_master_of_a_cluster_is_looked_at(tier, start):
    cluster = start(Cluster)
    cluster.masters[1].call("CONFIG SET", "proto-max-bulk-len", MIB)
    found = tier.open(cluster.url, topology="cluster").diagnose(2 * MIB)
    assert str(cluster.masters[1].port) in the("error", "proto-max-bulk-len", found)
    assert len([finding for finding in found if ", master, " in finding.text]) == 3


def test_for_a_user_who_may_not_look_the_findings_name_what_was_not_checked(tier, tls_server):
    tls = tls_server.tls
    found = tier.open(
        tls_server.url, username="kv", password="tier-secret", tls_ca=tls.ca, tls_cert=tls.cert, tls_key=tls.key
    ).diagnose(2 * MIB)
    assert {finding.level for finding in found} == {"ok"}
    the("ok", "INFO is not permitted", found)
    the("ok", "TLS; certificate and host name are checked", found)


def test_where_config_is_forbidden_policy_and_append_only_file_are_known_all_the_same(tier, server):
    server.call("ACL SETUSER", "kv", "on", ">x", "~*", "+@all", "-config")
    server.call("CONFIG SET", "maxmemory-policy", "noeviction")
    server.call("CONFIG SET", "appendonly", "yes")
    found = found_on(tier, server, username="kv", password="x")
    the("warning", "maxmemory-policy noeviction: once it is full", found)
    the("warning", "appendonly yes: saving gigabytes", found)
    the("ok", "CONFIG GET is not permitted, so its limits and 'save' were not checked", found)
    server.call("CONFIG SET", "appendonly", "no")
    found = found_on(tier, server, username="kv", password="x")
    assert not [finding for finding in found if "disk" in finding.text], "unknown, without 'save'"


def test_a_server_that_takes_one_setting_at_a_time_is_checked(tier, server, monkeypatch):
    config_get = redis.Redis.config_get

    def one_alone(client, *patterns):  # as before Redis 7
        if len(patterns) != 1:
            raise redis.exceptions.ResponseError("wrong number of arguments for 'config|get' command")
        return config_get(client, *patterns)

    monkeypatch.setattr(redis.Redis, "config_get", one_alone)
    server.call("CONFIG SET", "proto-max-bulk-len", MIB)
    found = found_on(tier, server)
    the("error", "proto-max-bulk-len 1MiB refuses", found)
    assert "permitted" not in str(found)


def test_clear_text_to_another_machine_is_a_warning(tier, single, monkeypatch):
    monkeypatch.setattr("kvtiers_redis.servers.is_loopback", lambda host: False)
    the("warning", "values travel in clear text", found_on(tier, single))


def test_a_server_that_died_since_is_an_error(tier, start):
    server = start()
    store = tier.open(server.url)
    server.kill()
    the("error", "does not answer", store.diagnose(2 * MIB))
