"""A subscriber of KV events, and the index that a router makes of them: which blocks an engine has, and where.

It has no word of kvtiers' in it: the form is vLLM's, so it follows a vLLM as well. With no arguments it follows a small
engine that it starts itself (``examples/engine.py``)::

    python examples/kv_events.py
    python examples/kv_events.py tcp://HOST:5557 tcp://HOST:5558       # a running engine: its events, its replays
"""

import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec
import zmq


class Index:
    """Which blocks are in which place. A place: medium, locality, and the name of the tier, where it is one."""

    def __init__(self) -> None:
        self.blocks: defaultdict[tuple[str, str, str], set[int]] = defaultdict(set)

    def apply(self, event: dict[str, Any]) -> None:
        """Follow one event."""
        if event["type"] == "AllBlocksCleared":
            self.blocks.clear()
            return
        place = (event["medium"] or "GPU", event.get("locality") or "", event.get("ownership") or "")
        if event["type"] == "BlockStored":
            self.blocks[place].update(event["block_hashes"])
        else:
            self.blocks[place].difference_update(event["block_hashes"])

    def print(self, what: str) -> None:
        """Print how many blocks are where."""
        where = ", ".join(f"{len(found)} in {' '.join(filter(None, place))}" for place, found in self.blocks.items())
        print(f"{what:<34}{where or 'nothing is anywhere'}")


class Subscriber:
    """Receives batches in order, and asks again for missed ones; where they are not kept any more, it starts over."""

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str = "") -> None:
        self.context = zmq.Context()
        self.live = self.context.socket(zmq.SUB)
        self.live.connect(endpoint)
        self.live.subscribe(topic)
        self.replay_endpoint = replay_endpoint
        self.next, self.made = 0, 0.0  # the next batch's number, and when the last one was made

    def replay(self) -> Iterator[dict[str, Any]]:
        """Yield the events of the batches that the engine still keeps, from the next one on."""
        asking = self.context.socket(zmq.DEALER)  # a REQ gets one answer to each question, and there are many
        asking.connect(self.replay_endpoint)
        asking.send_multipart([b"", self.next.to_bytes(8, "big")])
        while asking.poll(5_000):
            _, _, number, batch = asking.recv_multipart()
            if not batch:
                break
            yield from self._events(int.from_bytes(number, "big"), batch)
        asking.close(linger=0)

    def events(self, seconds: float) -> Iterator[dict[str, Any]]:
        """Yield the events that come, until none has come for so many seconds."""
        while self.live.poll(int(seconds * 1000)):
            _, number, batch = self.live.recv_multipart()
            if int.from_bytes(number, "big") > self.next:
                yield from self.replay()
            yield from self._events(int.from_bytes(number, "big"), batch)

    def _events(self, number: int, batch: bytes) -> Iterator[dict[str, Any]]:
        made, events, _ = msgspec.msgpack.decode(batch)
        if number < self.next and made <= self.made:
            return  # it came by a replay already
        if number != self.next:  # some are lost for good, or it is another engine, whose numbers begin with 0
            yield {"type": "AllBlocksCleared"}
        self.next, self.made = number + 1, made
        yield from events

    def close(self) -> None:
        """Close the sockets."""
        self.context.destroy(linger=0)


def follow_an_engine_of_our_own() -> None:
    """Serve one prompt, with the memory that holds it emptied in between, and follow that from outside."""
    import engine  # the one beside this file

    engine.config["events"] = {"endpoint": "tcp://127.0.0.1:0", "bind": True, "replay_endpoint": "tcp://127.0.0.1:0"}
    small = engine.Engine()
    where = small.manager.stats()["events"]  # with port 0, as here, the kernel has chosen
    subscriber, index = Subscriber(where["endpoint"], where["replay_endpoint"]), Index()

    def follow(what: str) -> None:
        while small.manager.has_pending_work():
            small.manager.on_schedule_end()
        while subscriber.next < small.manager.stats()["events"]["next_batch"]:
            for event in subscriber.replay():
                index.apply(event)
        index.print(what)

    prompt = list(range(20 * engine.TOKENS_PER_BLOCK))
    follow("at the start:")
    small.serve("a", prompt)
    follow("a prompt was computed:")
    small.manager.reset_cache()
    follow("its engine has forgotten it:")
    small.serve("b", prompt)
    follow("it came up from its tier:")
    small.close()
    subscriber.close()


def main() -> None:
    """Follow the engine of the command line until it is interrupted, or one of our own."""
    if len(sys.argv) < 3:
        follow_an_engine_of_our_own()
        return
    subscriber, index = Subscriber(*sys.argv[1:3]), Index()
    for event in subscriber.replay():
        index.apply(event)
    while True:
        for event in subscriber.events(1.0):
            index.apply(event)
        index.print(f"batch {subscriber.next - 1}:")


if __name__ == "__main__":
    main()
