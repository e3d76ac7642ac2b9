"""A whole small engine around kvtiers: the calls that a real one makes, in their order.

It "computes" KV by writing bytes into two numpy tensors, and asks kvtiers first. Its tier, ``memory``, is in
``plugins/example_tier``::

    pip install ./core ./plugins/example_tier
    python examples/engine.py
"""

import hashlib
import sys
from collections.abc import Callable

import numpy as np

import kvtiers
from kvtiers import BlockSpec, CacheLayout, KVGroup, KVTensor, ModelIdentity, PromptGroup, RequestContext
from kvtiers.api import ConfigError, make_offload_key

TOKENS_PER_BLOCK, PAGE_BYTES, NUM_BLOCKS = 16, 8192, 64

layout = CacheLayout(
    model=ModelIdentity("example/engine", weights="v1"),
    groups=(KVGroup("all", TOKENS_PER_BLOCK),),
    tensors=(KVTensor("layer.0", group=0, page_bytes=PAGE_BYTES), KVTensor("layer.1", group=0, page_bytes=PAGE_BYTES)),
)
config = {
    "version": 1,
    "primary": {"capacity": "16MiB"},
    "secondary": [{"type": "memory", "capacity": "256MiB", "required": True}],  # so that wait_ready waits for it
    "lookup_wait": "1s",
    "load_wait": "1s",
}


def keys_of(tokens: list[int]) -> list[bytes]:
    """Chain the block hashes: equal keys mean equal whole prefixes."""
    keys, before = [], b"seed"
    for start in range(0, len(tokens) - TOKENS_PER_BLOCK + 1, TOKENS_PER_BLOCK):
        before = hashlib.sha256(before + repr(tokens[start : start + TOKENS_PER_BLOCK]).encode()).digest()
        keys.append(make_offload_key(before, group=0))
    return keys


class Engine:
    """One request at a time, one rank, in one process."""

    def __init__(self) -> None:
        self.kv = [np.zeros((NUM_BLOCKS, PAGE_BYTES), np.uint8) for _ in layout.tensors]
        self.manager = kvtiers.open_manager(config, layout)
        self.worker = kvtiers.open_worker(config, layout, self.kv, engine_id=self.manager.engine_id)
        self.manager.wait_ready(30)
        self.jobs = 0

    def serve(self, request_id: str, tokens: list[int]) -> int:
        """Load what is there, compute and store the rest; return how many blocks were not computed."""
        context, keys = RequestContext(request_id), keys_of(tokens)
        blocks = np.arange(len(keys))
        with self.manager.lock:
            hits = self.manager.reach([PromptGroup(keys)], context).in_chunks(self.manager.tokens_per_chunk[0])
            while hits.waits:  # a real engine serves other requests meanwhile
                self.manager.on_schedule_end()
                hits = self.manager.reach([PromptGroup(keys)], context).in_chunks(self.manager.tokens_per_chunk[0])
            if hits.ready and (load := self.manager.prepare_load(keys[: hits.ready], context)):
                spec = BlockSpec(blocks[: hits.ready], (hits.ready,), (0,))
                self.manager.complete_load(load, self.copied(self.worker.submit_load, load.chunk_ids, spec))
            for block in range(hits.ready, len(keys)):
                for layer, tensor in enumerate(self.kv):
                    tensor[block] = np.frombuffer(keys[block], np.uint8)[layer]  # "attention"
            store = self.manager.prepare_store(keys[hits.ready :], context)
            if store is not None:
                count = len(store.keys)
                spec = BlockSpec(blocks[len(keys) - count :], (count,), (len(keys) - count,))
                self.manager.complete_store(store, self.copied(self.worker.submit_store, spec, store.chunk_ids))
            self.manager.on_request_finished(context)
            self.manager.on_schedule_end()
        return hits.ready

    def copied(self, submit: Callable[..., None], *what: object) -> bool:
        """Run one copy to its end; a real engine polls ``get_finished`` between its steps."""
        self.jobs += 1
        submit(self.jobs, *what)
        self.worker.wait([self.jobs])
        return all(result.success for result in self.worker.get_finished())

    def close(self) -> None:
        """End the worker, then the manager: it releases the memory last."""
        self.worker.shutdown()
        self.manager.shutdown()


def main() -> None:
    """Serve one prompt three times: computed, from the primary, and from the tier after the primary was emptied."""
    try:
        engine = Engine()
    except ConfigError as error:  # such as that its tier is not installed
        sys.exit(f"{error}\nThe tier 'memory' is installed by: pip install ./plugins/example_tier")
    prompt = list(range(20 * TOKENS_PER_BLOCK))
    print("first time:       ", engine.serve("a", prompt), "blocks were there")
    print("second time:      ", engine.serve("b", prompt), "blocks were there")
    while engine.manager.has_pending_work():
        engine.manager.on_schedule_end()
    engine.manager.reset_cache()
    print("after a reset:    ", engine.serve("c", prompt), "blocks were there, from the tier")
    engine.close()


if __name__ == "__main__":
    main()
