"""Decoders of others, by shape: vLLM's of several generations, llm-d's positions, Dynamo's names."""

import msgspec
import pytest
from tests.kv_event_subscriber import AllBlocksCleared, Batch, BlockRemoved, BlockStored

from kvtiers.kv_events.wire import Wire

KIND = ("full_attention", None)
FIELDS = {
    "token_ids": [1, 2], "block_size": 2, "medium": "STORAGE", "group_idx": 0, "kv_cache_spec_kind": "full_attention",
    "locality": "REMOTE", "ownership": "s3",
}  # fmt: skip


def batch(encoding, rank=0):
    wire = Wire("int", encoding, rank)
    events = [wire.stored([7], 5, **FIELDS), wire.removed([7], medium="CPU", locality="LOCAL"), wire.cleared()]
    return wire.encode(1.5, events)


def test_events_of_the_map_encoding_are_vllms():
    decoded = msgspec.msgpack.decode(batch("map", 3), type=Batch)
    assert (decoded.ts, decoded.data_parallel_rank) == (1.5, 3)
    stored, removed, cleared = decoded.events
    assert stored == BlockStored(
        [7], 5, [1, 2], 2, None, "STORAGE", None, None, 0, "full_attention", None, "REMOTE", "s3"
    )
    assert removed == BlockRemoved([7], "CPU", None, "LOCAL", None)
    assert isinstance(cleared, AllBlocksCleared)


def test_events_of_the_array_encoding_have_the_positions_that_llm_d_reads():
    ts, (stored, removed, cleared), rank = msgspec.msgpack.decode(batch("array"))
    assert (ts, rank) == (1.5, 0)
    assert stored == [
        "BlockStored",
        [7],
        5,
        [1, 2],
        2,
        None,
        "STORAGE",
        None,
        None,
        0,
        "full_attention",
        None,
        "REMOTE",
        "s3",
    ]
    assert removed == ["BlockRemoved", [7], "CPU", None], "Dynamo has another field where the locality would follow"
    assert cleared == ["AllBlocksCleared"]


def test_a_decoder_of_an_early_vllm_reads_the_array_encoding_and_ignores_what_it_has_no_field_for():
    class Event(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
        pass

    class BlockStored(Event):
        block_hashes: list[int]
        parent_block_hash: int | None
        token_ids: list[int]
        block_size: int
        lora_id: int | None
        medium: str | None

    class BlockRemoved(Event):
        block_hashes: list[int]
        medium: str | None

    class AllBlocksCleared(Event):
        pass

    class Early(msgspec.Struct, array_like=True):
        ts: float
        events: list[BlockStored | BlockRemoved | AllBlocksCleared]

    stored, removed, _ = msgspec.msgpack.decode(batch("array"), type=Early).events
    assert (stored.block_hashes, stored.token_ids, stored.medium) == ([7], [1, 2], "STORAGE")
    assert (removed.block_hashes, removed.medium) == ([7], "CPU")


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_a_batch_has_three_fields_always_as_dynamo_wants_them(encoding):
    assert len(msgspec.msgpack.decode(batch(encoding))) == 3


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_a_field_that_removals_do_not_have_is_a_mistake_and_not_left_out(encoding):
    wire = Wire("int", encoding)
    with pytest.raises(TypeError, match="lokality"):
        wire.removed([7], medium="CPU", lokality="LOCAL")
