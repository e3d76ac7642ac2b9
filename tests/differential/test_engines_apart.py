"""Engines share nothing, whatever else is equal: their name is a field of the fingerprint."""

import dataclasses
import itertools
import re
import shutil
from pathlib import Path

import pytest
from tests.soak.soak import servers_of

from kvtiers import ModelIdentity, open_client
from kvtiers.api import make_offload_key
from kvtiers.cli.open_tier import anonymous_region, open_tier
from kvtiers.client.open import client_layout
from kvtiers.config import load_config
from kvtiers.layout.storage_name import StorageNames

ROOT = Path(__file__).parents[2]
SOURCES = [*sorted(ROOT.glob("integrations/*/src/*/identity.py")), ROOT / "replay/src/kvtiers_replay/options.py"]
ENGINES = [name for path in SOURCES for name in re.findall(r'\bengine="([^"]+)"', path.read_text(encoding="utf-8"))]
"""The name by which each integration states its engine."""
LENGTH, KEYS = 9_000, [bytes([number]) * 32 for number in range(4)]
COMMON = ModelIdentity("org/model", weights="w", kv_dtype="bfloat16", kv_layout="the same")


def identity(engine):
    return dataclasses.replace(COMMON, engine=engine)


def values(engine):
    """The bytes of one engine: of the same keys, and other ones for each engine."""
    return [f"{engine}-{key[0]}".encode().ljust(LENGTH, b".") for key in KEYS]


@pytest.fixture(params=["fs", "redis"])
def tiers(request, tmp_path):
    if request.param == "fs":
        tier = {"type": "fs", "path": str(tmp_path / "fs"), "capacity": "1GiB", "min_free": 0}
        yield {"version": 1, "primary": {"capacity": "1MiB"}, "secondary": [{**tier, "io": "thread"}]}
        return
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server here")
    server = servers_of("redis_tier/tests/servers").Server(tmp_path).start()
    tier = {"type": "redis", "url": server.url, "io": "thread"}
    yield {"version": 1, "primary": {"capacity": "1MiB"}, "start_wait": "30s", "secondary": [tier]}
    server.kill()


def put(tiers, engine):
    client = open_client(tiers, identity(engine), LENGTH)
    assert client.put(KEYS, values(engine)).stored == [True] * len(KEYS)
    client.close()


def found(tiers, engine):
    """What an engine of this name reads under the keys; None for each miss."""
    client = open_client(tiers, identity(engine), LENGTH)
    buffers = [bytearray(LENGTH) for _ in KEYS]
    there = client.get_into(KEYS, buffers)
    client.close()
    return [bytes(buffer) if is_there else None for buffer, is_there in zip(buffers, there, strict=True)]


def raw_names(tiers, engine):
    names = StorageNames.of_layout(load_config(tiers).namespace, client_layout(identity(engine), [LENGTH]))
    return [names.name(make_offload_key(key, 0)) for key in KEYS]


def test_every_integration_states_its_engine_and_no_two_the_same():
    assert sorted(ENGINES) == ["lmcache", "replay", "sglang", "transformers", "vllm"]
    folders = {path.parent.name for path in (ROOT / "integrations").glob("*/pyproject.toml")}
    assert folders | {"replay"} == set(ENGINES), "each has one"


def test_values_of_one_engine_are_misses_for_every_other_with_the_same_keys_lengths_and_layout(tiers):
    nothing = [None] * len(KEYS)
    put(tiers, ENGINES[0])
    for other in [*ENGINES[1:], ""]:
        assert found(tiers, other) == nothing, other
    for engine in [*ENGINES[1:], ""]:
        put(tiers, engine)
    for engine in [*ENGINES, ""]:
        assert found(tiers, engine) == values(engine), "its own, though all of them have stored under the same keys"


def test_with_the_field_left_out_they_would_share_so_that_these_tests_can_fail(tiers, monkeypatch):
    facts = ModelIdentity.facts
    monkeypatch.setattr(ModelIdentity, "facts", lambda its: facts(dataclasses.replace(its, engine="")))
    one, other = ENGINES[:2]
    put(tiers, one)
    assert found(tiers, other) == values(one)


def test_a_value_that_lies_under_another_engines_name_is_a_miss_by_its_seal(tiers):
    """The control: the same bytes are a hit for the engine that has stored them, from where they were copied to."""
    config = load_config(tiers)
    nbytes = client_layout(identity(""), [LENGTH]).value_bytes(0)
    store = open_tier(
        config.secondary[0],
        namespace=config.namespace,
        value_bytes=nbytes,
        region=(room := anonymous_region(1, nbytes)),
    )
    for one, other in itertools.permutations(ENGINES[:3], 2):
        put(tiers, one)
        own, others = raw_names(tiers, one), raw_names(tiers, other)
        for source, target in zip(own, others, strict=True):
            assert store.read_into(source, room)
            store.delete([target])
            store.write(target, room.toreadonly())
        assert found(tiers, other) == [None] * len(KEYS), (one, other)
        assert found(tiers, one) == values(one)
        store.delete([*own, *others])
    store.close()
