"""KV events, decoded with vLLM's own classes, of kvtiers' publisher and of vLLM's: what a router makes of them."""

import subprocess
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from kvtiers.api import make_offload_key
from kvtiers.config import load_config
from kvtiers.kv_events.naming import EventNaming
from kvtiers.kv_events.wire import Wire
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.testing.ports import free_port
from kvtiers.types import ChunkBlocks, OffloadEvent

from .conftest import PROMPTS
from .engines import BLOCK, PATIENCE, environment
from .models import make_adapter
from .ways import fs, whole_stack

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what vLLM imports
    from vllm.config.kv_events import KVEventsConfig
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

    from kvtiers_vllm.stack.events import VllmEvents

FIRST, _ = PROMPTS
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}


class Router:
    """A subscriber as vLLM's example is one, over its replay socket, and the index that it makes of the events."""

    def __init__(self, port: int) -> None:
        self._context = zmq.Context()
        self._port = port
        self._decode = msgspec.msgpack.Decoder(type=KVEventBatch).decode
        self._next = 0

    def events(self) -> Iterator[BlockStored | BlockRemoved | AllBlocksCleared]:
        """Yield the events of all batches since the last call; those are numbered without a gap."""
        asking = self._context.socket(zmq.DEALER)
        asking.connect(f"tcp://127.0.0.1:{self._port}")
        asking.send_multipart((b"", self._next.to_bytes(8, "big")))
        while asking.poll(60_000):
            _, topic, number, payload = asking.recv_multipart()
            if not payload:
                asking.close(linger=0)
                return
            assert topic == b"kv@pod@tiny"
            assert int.from_bytes(number, "big") == self._next
            self._next += 1
            batch = self._decode(payload)
            assert batch.data_parallel_rank == 0
            yield from batch.events
        raise AssertionError("the replay does not end")

    def receive(self, engine, until, events=None):
        """Step the engine until this holds for all events that have come; return them."""
        events = [] if events is None else events
        for _ in range(200):
            events += self.events()
            if until(events):
                return events
            engine.metrics()
        raise AssertionError(f"it never holds for {[(type(e).__name__, getattr(e, 'medium', '')) for e in events]}")

    def close(self):
        self._context.destroy(linger=0)


def index(events, medium):
    """What these events say of each block in a medium: parent, tokens, adapter, and what else is hashed."""
    blocks = {}
    for event in events:
        if isinstance(event, BlockStored) and event.medium == medium:
            parent, size = event.parent_block_hash, event.block_size
            extra = event.extra_keys or [None] * len(event.block_hashes)
            for place, each in enumerate(event.block_hashes):
                tokens = tuple(event.token_ids[place * size : (place + 1) * size])
                blocks[each] = (parent, tokens, event.lora_name, extra[place], event.group_idx)
                parent = each
    return blocks


def left_in(events, medium):
    """The blocks that are in a medium after these events."""
    there = set()
    for event in events:
        if isinstance(event, AllBlocksCleared):
            there.clear()
        elif event.medium == medium:
            there = there | set(event.block_hashes) if isinstance(event, BlockStored) else there - {*event.block_hashes}
    return there


@pytest.fixture
def routers():
    made = []

    def make(port):
        made.append(Router(port))
        return made[-1]

    yield make
    for router in made:
        router.close()


@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
def test_a_router_finds_the_blocks_of_the_gpu_in_the_primary_and_the_tier(
    start, model, tmp_path, routers, blocks_per_chunk
):
    mine, mine_replay, vllms, vllms_replay = (free_port() for _ in range(4))
    events = {"endpoint": f"tcp://*:{mine}", "replay_endpoint": f"tcp://*:{mine_replay}", "topic": "kv@pod@tiny"}
    config = whole_stack(fs(tmp_path / "store"), options={"events": events}, blocks_per_chunk=blocks_per_chunk)
    own = KVEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"tcp://*:{vllms}",
        replay_endpoint=f"tcp://*:{vllms_replay}",
        topic="kv@pod@tiny",
    )
    adapter = {"name": "mine", "number": 1, "path": str(make_adapter(tmp_path / "adapter", seed=1))}
    engine = start(model, config, kv_events_config=own, **LORA)
    chunk = BLOCK * blocks_per_chunk
    for more in ({}, {"salt": "mine"}, {"adapter": adapter}):
        engine.generate(FIRST, **more)
    blocks = 3 * (len(FIRST) // chunk) * blocks_per_chunk

    def all_stored(events):
        return all(len(left_in(events, medium)) == blocks for medium in ("CPU", "STORAGE"))

    of_vllm, of_kvtiers = routers(vllms_replay), routers(mine_replay)
    everything = of_vllm.receive(engine, all_stored)
    ours = of_kvtiers.receive(engine, all_stored)
    gpu = index(everything, "GPU")
    for below in (index(ours, "CPU"), index(ours, "STORAGE"), index(everything, "CPU"), index(everything, "STORAGE")):
        assert below == {each: gpu[each] for each in below}
    assert {salt for _, _, _, salt, _ in gpu.values() if salt} >= {("mine",)}
    places = defaultdict(set)
    for event in ours:
        places[event.medium].add((event.locality, event.ownership, event.kv_cache_spec_kind))
    assert places == {
        "CPU": {("LOCAL", None, "full_attention")},
        "STORAGE": {("LOCAL", "fs", "full_attention")},
    }

    engine.forget()
    ours = of_kvtiers.receive(engine, lambda events: not left_in(events, "CPU"), ours)
    assert isinstance(ours[-1], AllBlocksCleared)
    everything = of_vllm.receive(engine, lambda events: not left_in(events, "CPU"), everything)

    _, cached = engine.generate(FIRST)
    assert cached == [len(FIRST) // chunk * chunk]
    of_kvtiers.receive(engine, lambda events: len(left_in(events, "CPU")) * BLOCK >= cached[0], ours)
    again = index(ours[ours.index(AllBlocksCleared()) :], "CPU")
    assert again == {each: gpu[each] for each in again}, "also what came up from the tier is described"
    assert sum(len(tokens) for _, tokens, *_ in again.values()) >= cached[0]
    engine.shutdown()


def test_a_batch_has_the_bytes_that_vllms_own_publisher_would_send():
    place = {"medium": "STORAGE", "group_idx": 0, "locality": "REMOTE", "ownership": "s3"}
    kind = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 64}
    tokens = {"token_ids": [1, 2], "block_size": 2, "lora_id": None, "lora_name": "mine", "extra_keys": [("salt",)]}
    for hashes, names in (("int", [7, (1 << 64) - 1]), ("bytes", [b"7" * 32])):
        wire = Wire(hashes, "map", 3)
        ours = [wire.stored(names, names[0], **tokens, **place, **kind), wire.removed(names, **place), wire.cleared()]
        theirs = [
            BlockStored(names, names[0], **tokens, **place, **kind),
            BlockRemoved(names, **place),
            AllBlocksCleared(),
        ]
        batch = KVEventBatch(ts=1.5, events=theirs, data_parallel_rank=3)
        assert wire.encode(1.5, ours) == msgspec.msgpack.encode(batch)


def test_what_leaves_the_primary_at_once_is_removed_block_by_block_since_the_gpu_keeps_its_own():
    layout = CacheLayout(ModelIdentity("m", weights="w"), (KVGroup("g", 2),), (KVTensor("t", 0, 4000),), 2)
    config = load_config({"version": 1, "primary": {"capacity": "1MiB"}})
    side = VllmEvents(config, layout, EventNaming(0, (5,)))
    key = make_offload_key(b"b" * 32, 0)
    side.describe([ChunkBlocks(key, [b"a" * 32, b"b" * 32], None, [1, 2, 3, 4])])
    side.take([OffloadEvent([key], removed=False)])
    side.cleared()
    stored, removed = side.events()
    low = [int.from_bytes(each * 8, "big") for each in (b"a", b"b")]
    assert stored == BlockStored(
        low, None, [1, 2, 3, 4], 2, None, "CPU", None, None, 5, "full_attention", None, "LOCAL", None
    )
    assert removed == BlockRemoved(low, "CPU", 5, "LOCAL", None)
    assert side.events() == []


DECODE = """
import sys, msgspec
from vllm.distributed.kv_events import KVEventBatch
stored, removed, cleared = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=KVEventBatch).events
assert (stored.block_hashes, stored.token_ids, stored.medium, stored.locality) == ([7], [1, 2], "STORAGE", "REMOTE")
assert (removed.block_hashes, removed.medium, removed.locality) == ([7], "CPU", "LOCAL")
assert type(cleared).__name__ == "AllBlocksCleared"
"""


@pytest.mark.parametrize("release", [pytest.param("0.28.0", marks=pytest.mark.every_release), "0.33.0"])
def test_the_classes_of_other_releases_decode_it_too(release):
    wire = Wire("int", "map")
    place = {"medium": "STORAGE", "locality": "REMOTE", "ownership": "s3"}
    stored = wire.stored([7], None, token_ids=[1, 2], block_size=2, **place)
    batch = wire.encode(1.5, [stored, wire.removed([7], medium="CPU", locality="LOCAL"), wire.cleared()])
    command = [sys.executable, "-c", DECODE]
    done = subprocess.run(
        command, input=batch, env=environment(release), capture_output=True, check=False, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr.decode()
