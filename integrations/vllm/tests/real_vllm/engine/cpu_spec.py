"""vLLM's own tiering on a machine without a GPU: the copies between its blocks and its rows, which it refuses there."""

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


def _ids(spec: Any) -> list[int]:
    ids = spec.chunk_ids if hasattr(spec, "chunk_ids") else spec.block_ids
    return ids.tolist()


class CpuWorker(OffloadingWorker):
    """Copies in the calling thread; direct rows."""

    def __init__(self, spec: "CpuTieringSpec", caches: Any) -> None:
        chunks = "num_chunks" if hasattr(spec, "num_chunks") else "num_blocks"
        nbytes = "kv_bytes_per_chunk" if chunks == "num_chunks" else "kv_bytes_per_block"
        self._blocks = spec.blocks_per_chunk
        self._region = SharedOffloadRegion(
            engine_id=spec.config.engine_id,
            rank=spec.config.parallel.rank,
            cpu_page_size=spec.cpu_page_size_per_worker,
            **{chunks: getattr(spec, chunks), nbytes: spec.kv_bytes_per_chunk},
        )
        self._gpu = [tensor.tensor for tensor in caches.tensors]
        pages = [tensor.page_size_bytes for tensor in caches.tensors]
        self._rows = [self._region.create_next_worker_view(page * self._blocks) for page in pages]
        self._refs = caches.group_data_refs
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, to_rows=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        return self._copy(job_id, dst_spec, src_spec, to_rows=False)

    def _copy(self, job_id: int, gpu: Any, cpu: Any, *, to_rows: bool) -> bool:
        blocks, chunks, moved = gpu.block_ids.tolist(), _ids(cpu), 0
        for group, (count, first) in enumerate(zip(gpu.group_sizes, gpu.block_indices, strict=True)):
            skip = first % self._blocks
            wanted = -(-(count + skip) // self._blocks)
            rows, chunks = chunks[:wanted], chunks[wanted:]
            for index in range(count):
                chunk, place = divmod(skip + index, self._blocks)
                block = blocks.pop(0)
                for ref in self._refs[group]:
                    page = self._rows[ref.tensor_idx].shape[1] // self._blocks
                    row = self._rows[ref.tensor_idx][rows[chunk]][place * page :][: ref.page_size_bytes]
                    cell = self._gpu[ref.tensor_idx][block].view(torch.int8).flatten()[: ref.page_size_bytes]
                    (row if to_rows else cell).copy_(cell if to_rows else row)
                    moved += ref.page_size_bytes
        assert not [*blocks, *chunks], "more ids than the groups have"
        self._done.append(TransferResult(job_id, True, moved, 1e-6))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        return

    def shutdown(self) -> None:
        self._rows.clear()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    """vLLM's TieringOffloadingSpec, whose manager and tiers are used as they are."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if not self._worker:
            self._worker = CpuWorker(self, kv_caches)
        return self._worker
