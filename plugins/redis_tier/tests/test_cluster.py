"""A Cluster: batches split by node, slots that move, nodes that fail."""

import os
import threading
import time

import pytest
from redis.exceptions import RedisClusterException
from redis_hosted import hosted
from redis_servers import Cluster, wait_until
from redis_traffic import content_of, read_all, under_load, works, write_all

from kvtiers.api import make_offload_key
from kvtiers.secondary.store_tier import _PROBE_KEY
from kvtiers_redis.config import RedisConfig


def slot_of(cluster, name: str) -> int:
    return cluster.nodes[0].call("CLUSTER KEYSLOT", name)


def test_a_batch_is_split_by_node_and_answered_in_order(tier, shared_cluster, names):
    store = tier.open(shared_cluster.url, topology="cluster")
    many = names(60)
    absent = set(many[::7])
    assert all(write_all(store, [name for name in many if name not in absent]))
    held = [sum(bool(node.call("EXISTS", name)) for name in many if shared_cluster.owner(name) is node)
            for node in shared_cluster.masters]  # fmt: skip
    assert min(held) > 5
    assert sum(held) == len(many) - len(absent)
    assert read_all(store, many) == [None if name in absent else content_of(name) for name in many]
    assert list(store.exists(many)) == [name not in absent for name in many]
    assert sorted(entry.name for entry in store.list("ns/")) == sorted(set(many) - absent)
    store.delete(many)
    assert not any(store.exists(many))


def test_any_node_of_the_cluster_will_do_to_find_the_others(tier, start, names):
    cluster = start(Cluster)
    urls = [node.url for node in cluster.masters]
    many = names(20)
    assert all(write_all(tier.open(urls[0], topology="cluster"), many))
    cluster.masters[0].kill()
    store = tier.open(",".join([urls[0], *(url.removeprefix("redis://") for url in urls[1:])]), topology="cluster")
    found = read_all(store, many)
    assert any(found)


def move_slot(slot: int, source, target) -> None:
    """Move an empty slot, or what is left of one: the last step of a migration."""
    to = target.call("CLUSTER MYID").decode()
    for node in (target, source):
        node.call("CLUSTER SETSLOT", slot, "NODE", to)


def begin_to_move(slot: int, source, target) -> None:
    target.call("CLUSTER SETSLOT", slot, "IMPORTING", source.call("CLUSTER MYID").decode())
    source.call("CLUSTER SETSLOT", slot, "MIGRATING", target.call("CLUSTER MYID").decode())


def migrate(names, source, target) -> None:
    source.call("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *names)


def test_a_slot_that_has_moved_is_followed_and_remembered(tier, start, names):
    cluster = start(Cluster)
    store = tier.open(cluster.url, topology="cluster")
    tag = "{moved}"
    moved = [f"{tag}/{i}" for i in range(6)]
    others = names(20)
    assert all(write_all(store, [*moved, *others]))
    slot, source = slot_of(cluster, tag), cluster.owner(tag)
    target = next(node for node in cluster.masters if node is not source)
    begin_to_move(slot, source, target)
    migrate(moved, source, target)
    move_slot(slot, source, target)
    everything = [*moved, *others]
    assert read_all(store, everything) == [content_of(name) for name in everything]
    redirected = store.stats()["redirected_requests"]
    assert redirected >= 1
    read_all(store, everything)
    assert store.stats()["redirected_requests"] == redirected, "the new map is used"


def test_nodes_that_announce_what_no_client_reaches_are_reached_where_the_map_says(tier, start, names):
    cluster = start(Cluster)
    for number, node in enumerate(cluster.masters):
        node.call("CONFIG SET", "cluster-announce-hostname", f"node{number}.invalid")
        node.call("CONFIG SET", "cluster-preferred-endpoint-type", "hostname")

    def announced(node):
        return sorted(master[0].decode() for _, _, master, *_ in node.call("CLUSTER SLOTS"))

    hosts = [f"node{number}.invalid" for number in range(3)]
    wait_until(lambda: all(announced(node) == hosts for node in cluster.masters), "all nodes announce their names")
    many = names(20)
    with pytest.raises(RedisClusterException, match=r"node0\.invalid"):
        tier.open(cluster.url, topology="cluster", connect_timeout="1s")
    reached = {
        f"{host}:{node.port}": f"127.0.0.1:{node.port}" for host, node in zip(hosts, cluster.masters, strict=True)
    }
    store = tier.open(cluster.url, topology="cluster", address_map=reached)
    assert all(write_all(store, many))
    tag = "{moved}"
    moved = [f"{tag}/{i}" for i in range(4)]
    assert all(write_all(store, moved))
    slot = slot_of(cluster, tag)
    source = next(node for node in cluster.masters if node.call("EXISTS", moved[0]))
    target = next(node for node in cluster.masters if node is not source)
    begin_to_move(slot, source, target)
    migrate(moved, source, target)
    move_slot(slot, source, target)
    assert read_all(store, [*moved, *many]) == [content_of(name) for name in [*moved, *many]]
    assert store.stats()["redirected_requests"] >= 1  # to the address that a node announces


def test_a_slot_that_is_being_moved_is_read_and_written_on_both_sides(tier, start):
    cluster = start(Cluster)
    store = tier.open(cluster.url, topology="cluster")
    tag = "{half}"
    many = [f"{tag}/{i}" for i in range(8)]
    assert all(write_all(store, many))
    slot, source = slot_of(cluster, tag), cluster.owner(tag)
    target = next(node for node in cluster.masters if node is not source)
    begin_to_move(slot, source, target)
    migrate(many[:4], source, target)
    new = [f"{tag}/new{i}" for i in range(4)]
    assert read_all(store, [*many, *new]) == [*map(content_of, many), *[None] * 4]
    assert all(write_all(store, new))
    assert read_all(store, [*new, *many]) == [content_of(name) for name in [*new, *many]]
    store.delete([many[0], many[7], new[0]])
    assert list(store.exists([*many, *new])) == [False, *[True] * 6, False, False, *[True] * 3]


def test_a_lost_node_costs_its_share_of_the_values_and_the_others_are_there(tier, start, names):
    cluster = start(Cluster)
    for node in cluster.masters:
        node.call("CONFIG SET", "cluster-require-full-coverage", "no")
    hour = {"timeout": "1h", "connect_timeout": "1h", "deadline": "1h"}  # no call waits for the node that is gone
    store = tier.open(cluster.url, topology="cluster", **hour)
    many = names(60)
    assert all(write_all(store, many))
    lost = [name for name in many if cluster.owner(name) is cluster.masters[2]]
    cluster.masters[2].kill()
    assert read_all(store, many) == [None if name in lost else content_of(name) for name in many]
    assert [not kept for kept in write_all(store, many)] == [name in lost for name in many]
    assert store.stats()["unreachable_values"] == 2 * len(lost)
    with pytest.raises(type(store).transient_errors):
        read_all(store, lost)


def lost_slots(node) -> int:
    return int(node.call("CLUSTER INFO")["cluster_slots_fail"])


@pytest.mark.parametrize("covers_all", ["yes", "no"])
def test_a_lost_node_is_named_and_no_remedy_for_a_full_server(start, caplog, covers_all):
    """Where the others go on without it, and where they answer CLUSTERDOWN once its loss is noticed."""
    cluster = start(Cluster)
    for node in cluster.masters:
        node.call("CONFIG SET", "cluster-require-full-coverage", covers_all)
    breaker = {"failures": 10_000, "min_calls": 10_000}
    with hosted(RedisConfig(type="redis", url=cluster.url, topology="cluster", retries=0, breaker=breaker)) as tier:
        tier.wait_open()
        tier.step_until(tier.is_in_use, "in use")
        cluster.masters[2].kill()
        tier.store(20)
        tier.step_until(lambda: tier.figure("refusing") == 1, "it says that a part is missing")
        tier.step_until(tier.all_ended, "the job ends")
        [line] = [text for text in caplog.messages if "refusing: " in text]
        assert f"127.0.0.1:{cluster.masters[2].port}: " in line, "the node, and what is the matter with it"
        assert 0 < tier.figure("dropped_refused") < 20
        others = [node for node in cluster.masters if node is not cluster.masters[2]]
        for node in others:
            node.call("CONFIG SET", "cluster-node-timeout", "3000")
        wait_until(lambda: all(lost_slots(node) for node in others), "the others notice the loss")
        refused = tier.figure("dropped_refused")
        for _ in range(2):
            tier.store(20)
            tier.step_until(tier.all_ended, "these end")
        if covers_all == "yes":
            assert tier.figure("errors") > 0, "with no node that answers, the calls fail"
        else:
            assert 0 < tier.figure("dropped_refused") - refused < 40, "the others keep theirs"
        assert tier.figure("dropped_full") == tier.figure("full") == 0
        assert "maxmemory" not in caplog.text


def test_all_nodes_are_asked_at_the_same_time(tier, start, names):
    cluster = start(Cluster)
    for node in cluster.masters:
        node.call("CONFIG SET", "cluster-require-full-coverage", "no")
    hour = {"timeout": "1h", "connect_timeout": "1h", "deadline": "1h"}  # no call that waits gives the node up
    store = tier.open(cluster.url, topology="cluster", **hour)
    many = names(60)
    assert all(write_all(store, many))
    first = cluster.owner(many[0])
    others = [node for node in cluster.masters if node is not first]

    def reads(node) -> int:
        return node.info("commandstats").get("cmdstat_get", {}).get("calls", 0)

    before = [reads(node) for node in others]
    first.pause()
    found = []
    thread = threading.Thread(target=lambda: found.extend(read_all(store, many)), daemon=True)
    thread.start()
    try:
        for node, count in zip(others, before, strict=True):
            wait_until(lambda node=node, count=count: reads(node) > count, "the others are asked while one is silent")
    finally:
        first.resume()
    thread.join(30)
    assert found == [content_of(name) for name in many]


def test_a_failover_under_load_yields_no_wrong_byte_and_ends(tier, start, names):
    cluster = start(Cluster, replicas=1)
    store = tier.open(cluster.url, topology="cluster", timeout="2s", connect_timeout="2s")
    many = names(48)
    with under_load(store, many):
        cluster.masters[0].kill()
        rest = [node for node in cluster.nodes if node is not cluster.masters[0]]
        wait_until(lambda: cluster.replicas[0].has_role("master"), "the replica takes over")
        wait_until(lambda: cluster.is_whole(rest), "the cluster is whole again")
        # While others load, too: every client finds the new master.
        wait_until(lambda: works(store, many), "all values are back")


def test_a_server_that_is_no_cluster_is_said_so(tier, single):
    with pytest.raises(Exception, match="Cluster mode is not enabled"):
        tier.open(single.url, topology="cluster")


def test_nodes_that_hang_cost_a_call_its_timeout_once_and_the_others_are_read(tier, start, names):
    cluster = start(Cluster)
    store = tier.open(cluster.url, topology="cluster", timeout="8s", connect_timeout="1s")
    many = names(60)
    assert all(write_all(store, many))
    hung = cluster.masters[:2]
    there = [content_of(name) if cluster.owner(name) is cluster.masters[2] else None for name in many]
    for node in hung:
        node.pause()
    try:
        begin = time.monotonic()
        assert read_all(store, many) == there
        assert 7.9 < time.monotonic() - begin < 16, "two timeouts are 16 s"
    finally:
        for node in hung:
            node.resume()


def test_a_list_after_a_takeover_leaves_nothing_out_silently(tier, start, names):
    cluster = start(Cluster, replicas=1)
    store = tier.open(cluster.url, topology="cluster")
    many = names(60)
    assert all(write_all(store, many))
    replica = cluster.replicas[0]
    wait_until(lambda: replica.call("DBSIZE") == cluster.masters[0].call("DBSIZE"), "the replica has all")
    replica.call("CLUSTER FAILOVER", "TAKEOVER")
    wait_until(lambda: cluster.masters[0].has_role("slave"), "the old master has heard of it")
    connects = store.stats()["connects"]
    assert sorted(entry.name for entry in store.list("ns/")) == sorted(many)
    assert store.stats()["connects"] > connects, "the old master's are counted still"


def test_a_tier_comes_back_into_use_with_the_nodes_that_are_left(start):
    """Its probe may not stick to a key of the node that is gone: all other values would be misses until it is back."""
    cluster = start(Cluster)
    for node in cluster.masters:
        node.call("CONFIG SET", "cluster-require-full-coverage", "no")
    breaker = {"failures": 1, "delay": "50ms", "max_delay": "100ms"}
    with hosted(RedisConfig(type="redis", url=cluster.url, topology="cluster", retries=0, breaker=breaker)) as tier:
        tier.wait_open()
        tier.step_until(tier.is_in_use, "in use")
        lost = cluster.owner(tier.name_of(_PROBE_KEY).encode())
        keys = (make_offload_key(os.urandom(32), 0) for _ in range(1000))
        of_lost = next(key for key in keys if cluster.owner(tier.name_of(key).encode()) is lost)
        lost.kill()
        tier.store_keys([of_lost])
        tier.step_until(lambda: tier.figure("breaker_opened") == 1, "the breaker opens")
        tier.step_until(tier.is_in_use, "back in use")
        tier.store(30)
        tier.step_until(tier.all_ended, "the others store")
