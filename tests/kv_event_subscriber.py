"""A subscriber of KV events, as vLLM's own example is one: structs of the same shape, written here, and ZMQ sockets."""

from typing import Any

import msgspec
import zmq


class Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None


class BlockRemoved(Event):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Subscriber:
    """Receives batches; ``ready`` once it is known to receive them. ``seconds``: the longest wait for anything."""

    def __init__(self, endpoint, topic="", *, hwm=1000, seconds=20.0):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.set_hwm(hwm)
        self.socket.connect(endpoint)
        self.socket.subscribe(topic)
        self.milliseconds = int(seconds * 1000)
        self.decode = msgspec.msgpack.Decoder(Batch).decode

    def wait_until_subscribed(self, publisher):
        """Have it publish until the last batch so far arrives: what came before the subscription is lost."""
        for _ in range(2000):
            publisher.cleared()
            while self.socket.poll(10):
                number = int.from_bytes(self.socket.recv_multipart()[1], "big")
                if number + 1 == publisher.report()["next_batch"]:
                    return
        raise AssertionError("nothing that is published arrives")

    def receive(self):
        assert self.socket.poll(self.milliseconds), "no batch came"
        topic, number, batch = self.socket.recv_multipart()
        self.topic = topic
        return int.from_bytes(number, "big"), self.decode(batch)

    def replay(self, endpoint, first):
        """All that is kept from this number on, by number."""
        asking = self.context.socket(zmq.DEALER)
        asking.connect(endpoint)
        asking.send_multipart([b"", first.to_bytes(8, "big")])
        found = {}
        while True:
            assert asking.poll(self.milliseconds), "the replay does not end"
            empty, _, number, batch = asking.recv_multipart()
            assert not empty
            if int.from_bytes(number, "big", signed=True) == -1:
                asking.close(linger=0)
                return found
            found[int.from_bytes(number, "big")] = self.decode(batch)

    def close(self):
        self.context.destroy(linger=0)
