"""Objects through LMCache's factory: every byte comes back, and what differs in anything that matters is a miss."""

import tempfile
from collections.abc import Iterator

import pytest
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc

from .conftest import config_of
from .parts import Layout, SharedMemory, keys_of

SIZES = {
    "one tensor": Layout(),
    "two tensors": Layout((2, 3, 16, 64), (1, 1, 16, 132), dtypes=(torch.bfloat16, torch.uint8)),
    "odd length": Layout((1, 1, 7, 33), dtypes=(torch.float16,)),
    "2 MiB": Layout((2, 32, 256, 64)),
}
LARGE = Layout((2, 128, 16, 64))
"""Of 512 KiB: those of less than 256 are not mapped, since their copy costs less."""


def test_descriptors_are_three(serve):
    adapter = serve().adapter
    fds = {adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()}
    assert len(fds) == 3


def test_every_byte_comes_back_from_each_tier(serve, tier):
    server = serve(config=config_of(tier), kv_dtype="fp8_e4m3")
    for place, (what, layout) in enumerate(SIZES.items()):
        server.layout = layout
        keys = keys_of(5, first=10 * place)
        stored = server.store(keys)
        assert server.fetch(keys) == stored, what
        assert server.fetch(keys_of(2, first=10 * place + 4)) == [stored[4], None], what


@pytest.fixture
def shared() -> Iterator[SharedMemory]:
    """Give an L1 with a name. Ask for it before ``serve``, which has to be over first."""
    memory = SharedMemory()
    yield memory
    memory.close()


def test_an_l1_in_shared_memory_is_the_clients_region_and_shares_with_one_that_is_not(shared, serve, tier):
    """As the server has it: tier hosts read and write objects where they lie."""
    config = config_of(tier)
    mapped = serve(LARGE, config=config, memory=shared)
    stored = mapped.store(keys_of(5))
    assert mapped.fetch(keys_of(6)) == [*stored, None]
    assert direct_values(mapped) == 10
    if tier["type"] != "memory":
        other = serve(LARGE, config=config)
        assert other.fetch(keys_of(5)) == stored
        assert direct_values(other) == 0


@pytest.mark.parametrize("tier", ["fs"], indirect=True)
@pytest.mark.parametrize(("heads", "direct"), [(4, 0), (128, 1)])
def test_an_object_whose_copy_costs_less_than_a_claim_passes_a_bounce_row(shared, serve, tier, heads, direct):
    """Of 16 KiB, and of 512."""
    server = serve(Layout((2, heads, 16, 64)), config=config_of(tier), memory=shared)
    server.store(keys_of(1))
    assert direct_values(server) == direct


@pytest.mark.parametrize("tier", ["fs"], indirect=True)
def test_an_l1_that_cannot_be_mapped_passes_bounce_rows_with_one_line(shared, serve, tier, monkeypatch, said, caplog):
    """As where the file of its name is another by now."""
    with tempfile.NamedTemporaryFile() as other:
        monkeypatch.setattr("kvtiers_lmcache.clients._name_of", lambda *_: other.name)
        server = serve(LARGE, config=config_of(tier), memory=shared)
        stored = server.store(keys_of(2))
        assert server.fetch(keys_of(2)) == stored
    assert direct_values(server) == 0
    assert said() == []
    (line,) = [it.getMessage() for it in caplog.records if "is not mapped" in it.getMessage()]
    assert "no shared mapping of descriptor" in line
    assert "\n" not in line


def direct_values(server):
    (client,) = server.adapter.report_status()["clients"]
    return client["direct_values"]


def test_a_store_of_more_than_there_are_bounce_rows_is_whole(serve):
    server = serve(Layout((2, 16, 256, 64)), bounce_bytes="2MiB")
    keys = keys_of(20)
    assert server.fetch(keys) == [None] * 20
    stored = server.store(keys)
    assert server.fetch(keys) == stored


@pytest.mark.parametrize("tier", ["fs", "redis"], indirect=True)
def test_a_server_finds_what_one_before_it_has_stored(serve, tier):
    config = config_of(tier)
    first = serve(config=config)
    stored = first.store(keys_of(4))
    first.close()
    second = serve(config=config)
    assert second.fetch(keys_of(5)) == [*stored, None]


def test_objects_of_several_groups_in_one_task(serve):
    """A hybrid model has objects of different sizes; a lookup names the layout of each group."""
    server = serve()
    small, large = Layout((1, 2, 16, 32)), Layout((2, 8, 16, 128))
    keys = [*keys_of(3), *keys_of(3, object_group_id=1)]
    objects = [*server.memory.filled(3, small, 1), *server.memory.filled(3, large, 2)]
    for part in (slice(3), slice(3, 6)):
        assert server.put(keys[part], objects[part]).is_successful()
    descs = {0: small.desc, 1: large.desc}
    task = server.adapter.submit_lookup_and_lock_task([*keys, *keys_of(1, object_group_id=2)], descs)
    assert server.found(task, 7) == [True] * 6 + [False]
    into = [*server.memory.take(3, small), *server.memory.take(3, large)]
    assert server.load(keys, into) == [True] * 6
    assert [bytes(it.byte_array) for it in into] == [bytes(it.byte_array) for it in objects]


OTHER_KEYS = {
    "model": {"model_name": "test/other"},
    "rank": {"kv_rank": 1},
    "group": {"object_group_id": 2},
    "rank and group swapped": {"kv_rank": 1, "object_group_id": 0},
    "no salt": {"cache_salt": ""},
    "salt of the same length": {"cache_salt": "tenant b"},
    "longer salt": {"cache_salt": "tenant aa"},
}


def test_another_key_is_a_miss(serve):
    server = serve()
    own = {"kv_rank": 0, "object_group_id": 1, "cache_salt": "tenant a"}
    stored = server.store(keys_of(2, **own))
    for what, other in OTHER_KEYS.items():
        keys = keys_of(2, **{**own, **other})
        assert server.fetch(keys) == [None, None], what
        assert server.load(keys, server.memory.take(2, server.layout)) == [False, False], what
    assert server.fetch(keys_of(2, **own)) == stored


OTHER_SERVERS = {
    "dtype": (Layout(dtypes=(torch.float16,)), {}),
    "shape of the same size": (Layout((2, 4, 128, 16)), {}),
    "tensors of the same size": (Layout((2, 2, 16, 128), (2, 2, 16, 128)), {}),
    "longer shape": (Layout((2, 5, 16, 128)), {}),
    "weights": (Layout(), {"weights": "another revision"}),
    "weights of this model": (Layout(), {"weights": {"test/model": "a third revision"}}),
    "layout by option": (Layout(), {"kv_layout": "HND"}),
    "numbers by option": (Layout(), {"kv_dtype": "fp8_e5m2"}),
}


def test_another_servers_values_are_misses(serve):
    first = serve()
    stored = first.store(keys_of(2))
    for place, (what, (layout, options)) in enumerate(OTHER_SERVERS.items()):
        other = serve(layout, **options)
        assert other.lookup(keys_of(2)) == [False, False], what
        assert other.load(keys_of(2), other.memory.take(2, layout)) == [False, False], what
        own = other.store(keys_of(2), seed=place + 1)
        assert other.fetch(keys_of(2)) == own, what
        other.close()
    assert first.fetch(keys_of(2)) == stored
    assert serve().fetch(keys_of(2)) == stored


def test_weights_by_the_models_name_are_those_of_the_model(serve):
    stored = serve().store(keys_of(1))
    assert serve(weights={"test/model": "0123abc", "x": "y"}).fetch(keys_of(1)) == stored


def test_another_release_of_lmcache_begins_with_a_cold_cache(serve, monkeypatch):
    serve().store(keys_of(1))
    monkeypatch.setattr("kvtiers_lmcache.identity.version", lambda name: "0.5.7")
    assert serve().fetch(keys_of(1)) == [None]


def test_a_lookup_with_another_layout_than_the_store_is_a_miss(serve):
    """The two see an object from two sides: what is stored by its own shape, what is asked for by the engine's."""
    server = serve()
    stored = server.store(keys_of(1))
    assert server.lookup(keys_of(1), Layout(dtypes=(torch.float16,))) == [False]
    assert server.fetch(keys_of(1)) == stored


@pytest.mark.parametrize("descs", [{}, {0: MemoryLayoutDesc([], [])}], ids=["none", "an empty one"])
def test_a_lookup_without_a_layout_asks_for_all_kinds_in_use(serve, descs):
    """LMCache calls the layout a hint, and its own tools give none. A load goes by the object's own shape."""
    server = serve()
    keys = keys_of(3)
    stored = server.store(keys[:1])
    server.layout = Layout(dtypes=(torch.float16,))
    server.store(keys[1:2])
    task = server.adapter.submit_lookup_and_lock_task(keys, descs)
    assert server.found(task, 3) == [True, True, False]
    assert server.adapter.report_status()["locked_keys"] == 2
    assert server.load(keys[:2], server.memory.take(2, Layout())) == [True, False]
    server.adapter.submit_unlock(keys[:2])
    server.layout = Layout()
    assert server.fetch(keys[:1]) == stored


def test_an_object_that_is_shorter_than_its_shape_is_not_stored(serve):
    """As a serializer leaves it: its length is not what a lookup would ask for."""
    server = serve()
    narrowed, whole = server.memory.filled(2, server.layout, 1)
    narrowed.set_used_size(100)
    result = server.put(keys_of(2), [narrowed, whole])
    assert not result.is_successful()
    assert server.lookup(keys_of(2)) == [False, True]


def test_a_model_in_a_folder_is_named_by_its_files(serve, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.bin").write_bytes(b"w" * 9_000)
    keys = keys_of(2, model_name=str(folder))
    stored = serve(weights="").store(keys)
    assert serve(weights="").fetch(keys) == stored
    (folder / "model.bin").write_bytes(b"w" * 8_999 + b"v")
    assert serve(weights="").fetch(keys) == [None, None]


@pytest.mark.parametrize("weights", ["", {"test/other": "0123abc"}])
def test_a_model_whose_weights_have_no_name_is_refused_in_one_line(serve, weights, said):
    server = serve(weights=weights)
    objects = server.memory.filled(1, server.layout, 0)
    for _ in range(3):
        assert not server.put(keys_of(1), objects).is_successful()
        assert server.lookup(keys_of(1)) == [False]
    (line,) = said()
    assert "the weights of 'test/model' cannot be identified" in line
    assert "set 'weights'" in line
    assert "\n" not in line


def test_a_packed_cache_that_does_not_say_of_what_is_refused(serve, said):
    layout = Layout(dtypes=(torch.uint8,))
    server = serve(layout)
    assert not server.put(keys_of(1), server.memory.filled(1, layout, 0)).is_successful()
    assert "set 'kv_dtype'" in said()[0]
    stored = serve(layout, kv_dtype="fp8_e4m3").store(keys_of(1))
    assert serve(layout, kv_dtype="fp8_e4m3").fetch(keys_of(1)) == stored
    assert serve(layout, kv_dtype="fp8_e5m2").fetch(keys_of(1)) == [None]
