import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.api import make_offload_key
from kvtiers.api.keys import with_tenant
from kvtiers.config import EventsConfig, EventTierConfig, load_config
from kvtiers.kv_events.chunk_table import ChunkTable
from kvtiers.kv_events.naming import GroupFacts, Place, place_of
from kvtiers.kv_events.wire import Wire
from kvtiers.types import ChunkBlocks, OffloadEvent

PLACES = {"": Place("CPU", "LOCAL"), "disk": Place("DISK", "LOCAL", "disk"), "s3": Place("STORAGE", "REMOTE", "s3")}
GROUPS = [GroupFacts(0, 4, "full_attention"), GroupFacts(3, 2, "sliding_window", 64)]


def blocks(name, count, start=0):
    return [f"{name}{place:02}".encode() for place in range(start, start + count)]


def chunk(name, number=0, per_chunk=2, group=0, adapter=None, before=None):
    """Chunk ``number`` of a prompt; ``before``: the prompt's first blocks, where they are another's."""
    prompt = [*(before or []), *blocks(name, 20)]
    hashes = prompt[number * per_chunk : (number + 1) * per_chunk]
    size = GROUPS[group].tokens_per_block
    first = number * per_chunk * size
    parent = prompt[number * per_chunk - 1] if number else None
    tokens = range(first, first + per_chunk * size)
    return ChunkBlocks(make_offload_key(hashes[-1], group), hashes, parent, tokens, adapter)


@pytest.fixture
def bounds():
    return {}


@pytest.fixture
def table(bounds):
    return ChunkTable(Wire("bytes", "map"), GROUPS, PLACES, tokens=True, **bounds)


def events(table, keys, *, removed=False, tier=""):
    return [
        msgspec.to_builtins(event, builtin_types=(bytes,)) for event in table.events(OffloadEvent(keys, removed, tier))
    ]


def test_a_block_that_two_tenants_have_is_removed_with_the_last_of_them(table):
    whole = chunk("a", per_chunk=1)
    mine = [whole._replace(key=with_tenant(whole.key, tenant)) for tenant in ("blue", "red")]
    table.describe(mine)
    blue, red = (each.key for each in mine)
    events(table, [blue, red])
    assert events(table, [blue], removed=True) == []
    (gone,) = events(table, [red], removed=True)
    assert gone["block_hashes"] == [b"a00"]


def test_tokens_that_are_no_token_ids_are_published_as_they_are(table):
    odd = chunk("a")._replace(tokens=[-1, 1 << 40, *range(6)])
    table.describe([odd])
    assert events(table, [odd.key])[0]["token_ids"] == [-1, 1 << 40, *range(6)]


def test_a_described_chunk_is_published_with_all_its_blocks_and_tokens(table):
    one = chunk("a")
    table.describe([one])
    assert events(table, [one.key]) == [
        {
            "type": "BlockStored",
            "block_hashes": [b"a00", b"a01"],
            "parent_block_hash": None,
            "token_ids": list(range(8)),
            "block_size": 4,
            "lora_id": None,
            "medium": "CPU",
            "lora_name": None,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
            "locality": "LOCAL",
        }
    ]


def test_chunks_of_one_prefix_are_one_event_and_those_of_another_are_not(table):
    prompt = [chunk("a", 0), chunk("a", 1), chunk("b", 0), chunk("b", 2)]
    table.describe(prompt)
    first, second, third = events(table, [each.key for each in prompt])
    assert first["block_hashes"] == blocks("a", 4)
    assert first["token_ids"] == list(range(16))
    assert second["block_hashes"] == blocks("b", 2)
    assert (third["block_hashes"], third["parent_block_hash"]) == (blocks("b", 2, 4), b"b03")


@pytest.mark.parametrize(
    ("tier", "place"),
    [
        ("", ("CPU", "LOCAL", None)),
        ("disk", ("DISK", "LOCAL", "disk")),
        ("s3", ("STORAGE", "REMOTE", "s3")),
        ("new", ("STORAGE", None, "new")),
    ],
)
def test_medium_locality_and_tier_are_those_of_the_place(table, tier, place):
    one = chunk("a")
    table.describe([one])
    for removed in (False, True):
        (event,) = events(table, [one.key], removed=removed, tier=tier)
        assert (event["medium"], event.get("locality"), event.get("ownership")) == place
        assert event["block_hashes"] == [b"a00", b"a01"]


def test_an_adapter_and_a_window_are_named(table):
    one = chunk("a", group=1, adapter="alice")
    table.describe([one])
    (event,) = events(table, [one.key])
    assert (event["lora_name"], event["group_idx"], event["block_size"]) == ("alice", 3, 2)
    assert (event["kv_cache_spec_kind"], event["kv_cache_spec_sliding_window"]) == ("sliding_window", 64)


def test_a_chunk_that_is_not_described_is_published_by_its_last_block_without_tokens(table):
    keys = [make_offload_key(each, 0) for each in blocks("a", 3)]
    (event,) = events(table, keys)
    assert event["block_hashes"] == blocks("a", 3)
    assert (event["token_ids"], event["block_size"], event["parent_block_hash"]) == ((), 0, None)
    (event,) = events(table, keys, removed=True)
    assert event["block_hashes"] == blocks("a", 3)


def test_without_tokens_blocks_are_still_named():
    table = ChunkTable(Wire("bytes", "map"), GROUPS, PLACES, tokens=False)
    one = chunk("a")
    table.describe([one])
    (event,) = events(table, [one.key])
    assert (event["block_hashes"], event["token_ids"], event["block_size"]) == ([b"a00", b"a01"], [], 0)


def test_hashes_are_the_last_64_bits_where_that_is_wanted():
    table = ChunkTable(Wire("int", "map"), GROUPS, PLACES, tokens=True)
    table.describe([ChunkBlocks(make_offload_key(b"\xff" * 31 + b"\x07", 0), [b"\xff" * 31 + b"\x07"], b"\x01" * 32)])
    (event,) = events(table, [make_offload_key(b"\xff" * 31 + b"\x07", 0)])
    assert event["block_hashes"] == [(1 << 64) - 256 + 7]
    assert event["parent_block_hash"] == 0x0101010101010101


def test_a_block_that_two_chunks_have_is_removed_with_the_last_of_them(table):
    one, two = chunk("a"), chunk("b", before=[b"a00"])
    table.describe([one, two])
    events(table, [one.key, two.key])
    (event,) = events(table, [one.key], removed=True)
    assert event["block_hashes"] == [b"a01"]
    (event,) = events(table, [two.key], removed=True)
    assert event["block_hashes"] == [b"a00", b"b00"]


def test_a_block_that_two_chunks_have_is_stored_with_the_first_of_them(table):
    one, two = chunk("a"), chunk("b", before=[b"a00"])
    table.describe([one, two])
    events(table, [one.key])
    (event,) = events(table, [two.key])
    assert (event["block_hashes"], event["parent_block_hash"]) == ([b"b00"], b"a00")
    assert event["token_ids"] == list(range(4, 8)), "those of its second block"


def test_the_parts_of_a_chunk_around_a_block_that_another_one_has_are_two_events(table):
    whole = chunk("a", per_chunk=4)._replace(extra_keys=[("one",), None, None, ("four",)])
    table.describe([whole, middle := ChunkBlocks(make_offload_key(b"a01", 0), [b"a01"], b"a00", range(4, 8))])
    events(table, [middle.key])
    first, last = events(table, [whole.key])
    assert (first["block_hashes"], first["token_ids"], first["extra_keys"]) == ([b"a00"], [0, 1, 2, 3], [("one",)])
    assert (last["block_hashes"], last["parent_block_hash"]) == ([b"a02", b"a03"], b"a01")
    assert (last["token_ids"], last["extra_keys"]) == (list(range(8, 16)), [None, ("four",)])


def test_the_same_holds_for_chunks_that_are_not_described(table):
    blue, red = (with_tenant(chunk("a").key, tenant) for tenant in ("blue", "red"))
    assert [event["block_hashes"] for event in events(table, [blue, red])] == [[b"a01"]]
    assert events(table, [blue], removed=True) == []
    assert [event["block_hashes"] for event in events(table, [red], removed=True)] == [[b"a01"]]


def test_a_chunk_that_was_not_reported_is_not_removed_from_the_primary(table):
    one, two = chunk("a"), chunk("b", before=[b"a00"])
    table.describe([one, two])
    events(table, [one.key])
    assert events(table, [two.key, make_offload_key(b"never", 0)], removed=True) == []


@pytest.mark.parametrize("bounds", [{"most_reports": 3, "most_counted": 2}])
def test_what_a_tier_has_stored_is_removed_as_often_as_it_was_reported_which_is_bounded(table):
    often, once = chunk("a"), chunk("b")
    table.describe([often, once])
    assert [len(events(table, [often.key], tier="s3")) for _ in range(5)] == [1, 1, 1, 0, 0]
    events(table, [once.key], tier="s3")
    removed = events(table, [often.key, once.key], removed=True, tier="s3")
    assert [event["block_hashes"] for event in removed] == [[*often.hashes, *once.hashes], often.hashes, often.hashes]
    events(table, [often.key, often.key, once.key, chunk("c").key], tier="disk")
    assert len(table._reports) == 2
    assert len(events(table, [often.key], removed=True, tier="disk")) == 1, "the oldest is not counted any more"


def test_an_evicted_chunk_is_still_described_when_a_tier_has_stored_it(table):
    one = chunk("a")
    table.describe([one])
    events(table, [one.key])
    events(table, [one.key], removed=True)
    (event,) = events(table, [one.key], tier="disk")
    assert event["token_ids"] == list(range(8))


@pytest.mark.parametrize("bounds", [{"most_recent": 10}])
def test_descriptions_of_what_is_not_in_the_primary_are_bounded_and_those_of_the_rest_stay(table):
    kept = chunk("kept")
    table.describe([kept])
    events(table, [kept.key])
    table.describe([chunk(f"{number:02}") for number in range(50)])
    assert len(table._recent) == 10
    assert events(table, [chunk("49").key])[0]["token_ids"]
    assert not events(table, [chunk("00").key])[0]["token_ids"]
    assert events(table, [kept.key], removed=True)[0]["block_hashes"] == [b"kept00", b"kept01"]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 3))))
def test_what_a_router_believes_is_what_the_primary_has(steps):
    """A router that adds and removes blocks by the events, without counting, has the blocks of the resident chunks."""
    table = ChunkTable(Wire("bytes", "map"), GROUPS, PLACES, tokens=True)
    shared = blocks("shared", 3)  # one whole chunk and half of the second
    chunks = {
        (prompt, number): chunk(f"p{prompt}", number, before=shared) for prompt in range(6) for number in range(4)
    }
    resident, router = {}, set()
    for store, prompt, number in steps:
        one = chunks[prompt, number]
        if store and one.key not in resident:
            table.describe([one])
            resident[one.key] = one
            for event in events(table, [one.key]):
                router |= set(event["block_hashes"])
        elif not store and resident.pop(one.key, None):
            for event in events(table, [one.key], removed=True):
                router -= set(event["block_hashes"])
    assert router == {each for one in resident.values() for each in one.hashes}


@pytest.mark.parametrize(
    ("tier", "locality"),
    [
        ({"type": "memory", "capacity": "1GiB"}, "LOCAL"),
        ({"type": "fs", "path": "/mnt", "capacity": "1GiB"}, "LOCAL"),
        ({"type": "redis", "url": "redis://cache"}, "REMOTE"),
    ],
)
def test_a_tier_that_others_share_over_a_network_is_remote_unless_the_config_says_otherwise(tier, locality):
    config = {"version": 1, "primary": {"capacity": "1GiB"}, "secondary": [tier]}
    (found,) = load_config(config).secondary
    assert place_of(found, EventsConfig()) == Place("STORAGE", locality, tier["type"])
    said = {tier["type"]: EventTierConfig(medium="DISK", locality="REMOTE")}
    assert place_of(found, EventsConfig(tiers=said)) == Place("DISK", "REMOTE", tier["type"])
    assert place_of(found, EventsConfig(tiers={tier["type"]: EventTierConfig(medium="DISK")})).locality == locality


@pytest.mark.parametrize(
    ("encoding", "tier", "removals"),
    [
        ("map", None, {"disk": 1, "s3": 1}),
        ("array", "named", {"disk": 1, "s3": 1}),
        ("array", None, {"disk": 1, "s3": 0}),
    ],
)
def test_a_removal_that_cannot_say_it_is_remote_removes_nothing_local(encoding, tier, removals):
    """An array has no locality: a router that left out what is stored at s3 would remove the disk's block."""
    places = {"disk": Place("STORAGE", "LOCAL", tier and "disk"), "s3": Place("STORAGE", "REMOTE", tier and "s3")}
    table = ChunkTable(Wire("bytes", encoding), GROUPS, places, tokens=True)
    key = chunk("a").key
    for name in places:
        assert len(events(table, [key], tier=name)) == 1
        assert len(events(table, [key], removed=True, tier=name)) == removals[name]


def test_the_primary_s_blocks_can_be_removed_one_by_one_for_a_stream_that_has_others_too(table):
    known, bare = chunk("a"), make_offload_key(b"bare", 0)
    table.describe([known])
    events(table, [known.key, bare])
    events(table, [known.key], tier="disk")
    removed = [msgspec.to_builtins(event, builtin_types=(bytes,)) for event in table.empty_primary()]
    assert [(event["type"], event["medium"]) for event in removed] == [("BlockRemoved", "CPU")]
    assert removed[0]["block_hashes"] == [b"a00", b"a01", b"bare"]
    assert list(table.empty_primary()) == []
