"""One worker of an engine: KV tensors, a `GpuWorker`, and a loop that does what the engine's process says.

Run by `multiprocessing` with spawn, so it is imported by its name. The same class runs in the engine's process where a
test needs no processes.
"""

import hashlib

import numpy as np

import kvtiers
from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.layout.rank_map import heads_rank_map

BLOCKS = 64
TOKENS, KV_HEADS, HEAD_BYTES, PARTS = 4, 8, 12, 2
PAGE = KV_HEADS * PARTS * TOKENS * HEAD_BYTES


def canonical_page(block_hash: bytes, layer: int) -> np.ndarray:
    """The KV that a whole model computes for one block and layer: (heads, parts, tokens, bytes)."""
    seed = int.from_bytes(hashlib.sha256(block_hash + bytes([layer])).digest()[:8], "big")
    return np.random.default_rng(seed).integers(0, 256, (KV_HEADS, PARTS, TOKENS, HEAD_BYTES), np.uint8)


class Rank:
    """One rank of a tensor parallel size and a pipeline parallel split."""

    def __init__(self, engine_id, config, layout, rank, tp_size, page_order="HND"):
        self.layout, self.rank, self.page_order = layout, rank, page_order
        self.tp_rank, self.tp_size = rank % tp_size, tp_size
        self.kv = [np.zeros((BLOCKS, page), np.uint8) if (page := t.page_on(rank)) else None for t in layout.tensors]
        rank_map = None
        if layout.row_layout == "canonical":
            rank_map = heads_rank_map(
                layout, rank=rank, kv_heads=KV_HEADS, tp_rank=self.tp_rank, tp_size=tp_size, page_order=page_order
            )
        self.worker = kvtiers.open_worker(config, layout, self.kv, engine_id=engine_id, rank=rank, rank_map=rank_map)

    def share(self, block_hash, layer):
        """This rank's heads of a block, in its own order."""
        heads = max(1, KV_HEADS // self.tp_size)
        first = self.tp_rank * KV_HEADS // self.tp_size
        mine = canonical_page(block_hash, layer)[first : first + heads]
        if self.layout.row_layout == "replicated":
            mine = canonical_page(block_hash, layer)
        axes = (1, 0, 2, 3) if self.page_order == "HND" else (1, 2, 0, 3)
        return np.ascontiguousarray(mine.transpose(axes)).ravel()

    def compute(self, block_ids, hashes):
        for layer, tensor in enumerate(self.kv):
            for block, block_hash in zip(block_ids, hashes, strict=True):
                if tensor is not None:
                    tensor[block] = self.share(block_hash, layer)

    def wrong(self, block_ids, hashes):
        """How many pages do not hold what this rank would have computed."""
        return sum(
            not np.array_equal(tensor[block], self.share(block_hash, layer))
            for layer, tensor in enumerate(self.kv)
            if tensor is not None
            for block, block_hash in zip(block_ids, hashes, strict=True)
        )

    def clear(self):
        for tensor in self.kv:
            if tensor is not None:
                tensor[:] = 0

    def transfer(self, loads, stores):
        """Make these transfers; return the results."""
        for job in loads:
            self.worker.submit_load(job.job_id, job.chunk_ids, job.blocks)
        for job in stores:
            self.worker.submit_store(job.job_id, job.blocks, job.chunk_ids)
        self.worker.wait([job.job_id for job in (*loads, *stores)])
        return self.worker.get_finished()

    def close(self):
        self.worker.shutdown()


def serve(pipe, engine_id, config, layout_json, rank, tp_size):
    """The loop of a worker process: (method, arguments) in, the method's value out, until the pipe ends."""
    worker = Rank(engine_id, config, CacheLayout.from_json(layout_json), rank, tp_size)
    try:
        while True:
            name, arguments = pipe.recv()
            pipe.send(getattr(worker, name)(*arguments))
    except EOFError:
        worker.close()
