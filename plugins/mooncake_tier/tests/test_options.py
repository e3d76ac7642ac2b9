"""Options that exclude each other, what an open store says of its settings, and pins, copies and tenants."""

import pytest
from pydantic import ValidationError

from kvtiers.api import ConfigError, TierUnavailable
from kvtiers_mooncake.client import MasterWatch, own_address
from kvtiers_mooncake.config import MooncakeConfig


def config(**options):
    return MooncakeConfig(**{"type": "mooncake", "master": "10.0.0.1", **options})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"master": "http://10.0.0.1"}, "expected HOST:PORT or one of etcd://"),
        ({"master": "10.0.0.1:70000"}, "expected HOST:PORT"),
        ({"master": ""}, "expected HOST:PORT"),
        ({"io": "thread"}, "give it a tier host: 'io: process'"),
        ({"devices": ["mlx5_0"]}, "'devices' needs 'protocol: rdma'"),
        ({"segment": "1MiB"}, "'segment' is 0 or at least 16MiB"),
        ({"offload": "/mnt/ssd"}, "'offload' needs 'segment'"),
        ({"offload": "ssd", "segment": "1GiB"}, "expected an absolute path"),
        ({"offload": "/mnt/ssd", "segment": "1GiB", "processes": 2}, "'offload' needs 'processes: 1'"),
        ({"offload": "/mnt/ssd", "segment": "1GiB", "processes": "auto"}, "'offload' needs 'processes: 1'"),
        ({"prefer_local": True}, "'prefer_local' needs 'segment'"),
        ({"tenant": "a/b"}, "String should match pattern"),
        ({"master_http": "http://10.0.0.1:9003"}, "expected HOST:PORT, got 'http://10.0.0.1:9003'"),
        ({"quotas": {"blue": "1GiB"}, "tenant": "a"}, "'quotas' and 'tenant' exclude each other"),
        ({"quotas": {"blue": "1GiB"}, "master": "etcd://10.0.0.1"}, "'quotas' need 'master_http' with 'master: etcd"),
    ],
)
def test_options_that_do_not_fit_are_refused_with_what_was_expected(options, expected):
    with pytest.raises(ValidationError) as refusal:
        config(**options)
    assert expected in str(refusal.value)


@pytest.mark.parametrize(
    ("master", "address", "as_text"),
    [
        ("10.0.0.1", ("10.0.0.1", 50051), "10.0.0.1:50051"),
        ("cache.internal:51000", ("cache.internal", 51000), "cache.internal:51000"),
        ("[::1]:51000", ("::1", 51000), "[::1]:51000"),
        ("etcd://10.0.0.1:2379;10.0.0.2:2379", None, "etcd://10.0.0.1:2379;10.0.0.2:2379"),
    ],
)
def test_the_master_is_taken_apart(master, address, as_text):
    assert config(master=master).address == address
    assert config(master=master).master_address == as_text


@pytest.mark.parametrize(
    ("options", "address"),
    [
        ({"master": "10.0.0.1:51000"}, ("10.0.0.1", 9003)),
        ({"master_http": "10.0.0.2"}, ("10.0.0.2", 9003)),
        ({"master": "etcd://10.0.0.1:2379", "master_http": "[::1]:9100"}, ("::1", 9100)),
        ({"master": "etcd://10.0.0.1:2379"}, None),
    ],
)
def test_the_masters_http_server_is_beside_it_unless_another_is_named(options, address):
    assert config(**options).http_address == address


def test_the_own_address_is_the_one_on_the_way_to_the_master():
    assert own_address(config(master="127.0.0.1")) == "127.0.0.1"
    assert own_address(config(hostname="node7")) == "node7"
    with pytest.raises(ConfigError, match="'hostname' is needed with 'master: etcd://"):
        own_address(config(master="etcd://10.0.0.1:2379"))
    with pytest.raises(TierUnavailable, match="no way to the master"):
        own_address(config(master="no-such-host.invalid"))


def test_after_a_failed_call_the_masters_port_is_tried_before_the_next_one():
    tried, answers = [], []

    def probe(address, timeout):
        tried.append((address, timeout))
        if answers:
            raise answers[0]

    watch = MasterWatch(config(connect_timeout="250ms"), probe)
    watch.before_call()
    assert not tried, "nothing has failed"
    watch.failed()
    answers.append(ConnectionRefusedError(111, "Connection refused"))
    for _ in range(2):
        with pytest.raises(TierUnavailable, match=r"no mooncake_master at 10\.0\.0\.1:50051: refused; start it"):
            watch.before_call()
    answers.clear()
    watch.before_call()
    assert tried == [(("10.0.0.1", 50051), 0.25)] * 3
    watch.succeeded()
    watch.before_call()
    assert len(tried) == 3


def test_values_may_be_pinned_and_copied(shared_master, open_store):
    options = {"soft_pin": "10m", "replicas": 3, "segment": "64MiB", "tenant": "team-a"}
    store = open_store(shared_master.address, **options)
    row = bytearray(4096)
    store.write("ns/pinned", memoryview(b"p" * 4096))
    assert store.read_into("ns/pinned", memoryview(row))
    assert bytes(row) == b"p" * 4096
    assert len(store._client.get_replica_desc("ns/pinned")) == 2, "there are two segments, for three copies"
    assert store.stats()["segment_bytes"] == 64 << 20


def test_a_diagnosis_names_what_is_to_be_mended(shared_master, open_store):
    store = open_store(shared_master.address, connection_pool=False, segment="16MiB")
    texts = {finding.text: finding for finding in store.diagnose(4 << 20)}
    assert any("answers in" in text for text in texts)
    assert any("was written and read back" in text for text in texts)
    for start in ("'connection_pool: false'", "'segment: 16MiB' has room for 4 values of 4MiB"):
        [finding] = [finding for text, finding in texts.items() if text.startswith(start)]
        assert finding.level == "warning"
        assert finding.fix


def test_values_may_be_kept_on_the_own_machine(shared_master, open_store):
    store = open_store(shared_master.address, segment="64MiB", prefer_local=True)
    names = [f"ns/near/{i}" for i in range(16)]
    assert store.write_many(names, [[memoryview(bytes(4096))]] * 16) == [None] * 16
    places = {
        store._client.get_replica_desc(name)[0].get_memory_descriptor().buffer_descriptor.transport_endpoint
        for name in names
    }
    assert len(places) == 1, "the other process's segment has room, too"


def test_the_place_is_the_master_and_the_tenant():
    assert config().place == config(master="10.0.0.1:50051", name="two").place == "10.0.0.1:50051 tenant default"
    assert config(tenant="blue").place == "10.0.0.1:50051 tenant blue"
    assert config(master="etcd://10.0.0.1").place == "etcd://10.0.0.1 tenant default"
