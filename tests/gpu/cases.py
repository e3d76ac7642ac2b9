"""Random transfers of random layouts, and a slow reference that says, fragment by fragment, which byte goes where."""

from dataclasses import dataclass, field
from functools import cache

import numpy as np
from hypothesis import strategies as st

from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.layout.rank_map import CopyRun, RankMap
from kvtiers.types import BlockSpec

NUM_BLOCKS = 40
FEW_GROUPS = st.integers(1, 5)


@dataclass(frozen=True)
class Split:
    """How one tensor's canonical page of equal fragments is dealt out to shards, each in an order of its own."""

    fragment_bytes: int
    shards: tuple[tuple[int, ...], ...]

    @property
    def fragments(self) -> int:
        return sum(map(len, self.shards))


@dataclass
class Case:
    layout: CacheLayout
    rank: int
    spec: BlockSpec
    chunk_ids: np.ndarray
    num_rows: int
    padding: int
    seed: int
    splits: tuple[Split, ...] = ()
    writers: int = 1
    kv: list = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.kv = [
            [
                rng.integers(0, 256, (NUM_BLOCKS, page + self.padding), np.uint8) if (page := t.page_on(rank)) else None
                for t in self.layout.tensors
            ]
            for rank in range(self.layout.world_size)
        ]
        for rank in range(self.layout.world_size):  # ranks that write by turns hold the same KV, padding apart
            if self.splits and rank % self.writers:
                self.kv[rank] = [tensor.copy() for tensor in self.kv[rank - 1]]
            if self.layout.row_layout == "replicated":
                self.kv[rank] = [tensor.copy() for tensor in self.kv[0]]
        self.region = rng.integers(0, 256, self.num_rows * self.layout.row_stride, np.uint8)

    def rank_map(self, rank: int) -> RankMap | None:
        if not self.splits:
            return None
        runs = [
            CopyRun(tensor, i * split.fragment_bytes, place * split.fragment_bytes, split.fragment_bytes)
            for tensor, split in enumerate(self.splits)
            for i, place in enumerate(split.shards[rank // self.writers])
        ]
        return RankMap(tuple(runs), rank % self.writers, self.writers)

    def fragments(self, rank: int):
        """Yield (tensor, block, first byte in the block, first byte in the region, bytes) of all that a rank moves."""
        blocks, chunks = list(self.spec.block_ids), list(self.chunk_ids)
        per_chunk = self.layout.blocks_per_chunk
        for group, size in enumerate(self.spec.group_sizes):
            place = self.spec.block_indices[group] % per_chunk
            chunk = None
            for _ in range(size):
                if chunk is None or place == per_chunk:
                    chunk, place = chunks.pop(0), 0 if chunk is not None else place
                block = int(blocks.pop(0))
                for tensor, in_block, offset, nbytes in self.cell(rank, group, place):
                    yield tensor, block, in_block, int(chunk) * self.layout.row_stride + offset, nbytes
                place += 1

    def written(self, rank: int):
        """What of it this rank writes, when it stores."""
        for fragment in self.fragments(rank):
            if self.splits and fragment[1] % self.writers != rank % self.writers:
                continue
            if self.layout.row_layout != "replicated" or rank == 0:
                yield fragment

    def cell(self, rank: int, group: int, wanted_place: int):
        """Walk a chunk as the layout's drawing shows it; yield where a rank's fragments of one place lie."""
        at = 0
        for owner in range(self.layout.world_size) if self.layout.row_layout == "direct" else [rank]:
            for index, tensor in enumerate(self.layout.tensors):
                for place in range(self.layout.blocks_per_chunk if tensor.group == group else 0):
                    page = tensor.canonical_page_bytes if self.splits else tensor.page_on(owner)
                    if owner == rank and place == wanted_place and page:
                        yield from self._page(rank, index, at, page)
                    at += page

    def _page(self, rank: int, index: int, at: int, page: int):
        if not self.splits:
            yield index, 0, at, page
            return
        split = self.splits[index]
        for i, fragment in enumerate(split.shards[rank // self.writers]):
            yield index, i * split.fragment_bytes, at + fragment * split.fragment_bytes, split.fragment_bytes


@cache
def _pages(largest: int) -> st.SearchStrategy[int]:
    return st.one_of(st.integers(1, 70), st.sampled_from([n for n in (8, 16, 512, 4096, 5000, 9000) if n <= largest]))


@st.composite
def cases(draw, *, max_page: int = 9000, groups=FEW_GROUPS, most_tensors: int = 3) -> Case:
    row_layout = draw(st.sampled_from(["direct", "replicated", "canonical"]))
    groups = draw(groups)
    counts = [draw(st.integers(1, most_tensors)) for _ in range(groups)]
    writers, splits = 1, ()
    if row_layout == "canonical":
        shards, writers = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        world = shards * writers
        splits = tuple(draw(_splits(shards)) for _ in range(sum(counts)))
        tensors = [
            KVTensor(
                f"t{index}",
                group,
                tuple(len(split.shards[rank // writers]) * split.fragment_bytes for rank in range(world)),
                split.fragments * split.fragment_bytes,
            )
            for index, (group, split) in enumerate(
                zip([group for group, count in enumerate(counts) for _ in range(count)], splits, strict=True)
            )
        ]
    else:
        world = draw(st.integers(1, 3))
        tensors = []
        for group, count in enumerate(counts):
            for index in range(count):
                by_rank = row_layout == "direct" and draw(st.booleans())
                sizes = (
                    draw(st.lists(st.integers(0, 40), min_size=world, max_size=world).filter(any)) if by_rank else ()
                )
                tensors.append(KVTensor(f"g{group}.t{index}", group, tuple(sizes) or draw(_pages(max_page))))
        tensors = draw(st.permutations(tensors))
    layout = CacheLayout(
        ModelIdentity("m"),
        tuple(KVGroup(f"g{group}", 16) for group in range(groups)),
        tuple(tensors),
        blocks_per_chunk=draw(st.one_of(st.integers(1, 9), st.sampled_from([16, 64]))),
        world_size=world,
        row_layout=row_layout,
    )
    sizes = tuple(draw(st.integers(0, 12) | st.just(0)) for _ in range(groups))
    indices = tuple(draw(st.integers(0, 100)) for _ in range(groups))
    per_chunk = layout.blocks_per_chunk
    needed = sum(-(-(n + i % per_chunk) // per_chunk) for n, i in zip(sizes, indices, strict=True) if n)
    rows = needed + draw(st.integers(1, 5))
    seed = draw(st.integers(0, 2**30))
    mixed = np.random.default_rng(seed)
    blocks = [b for n in sizes for b in mixed.permutation(NUM_BLOCKS)[:n]]
    return Case(
        layout,
        rank=draw(st.integers(0, world - 1)),
        spec=BlockSpec(np.array(blocks, np.int64), sizes, indices),
        chunk_ids=mixed.permutation(rows)[:needed].astype(np.int32),
        num_rows=rows,
        padding=draw(st.sampled_from([0, 0, 3, 16])),
        seed=seed,
        splits=splits,
        writers=writers,
    )


def cases_of_many_groups() -> st.SearchStrategy[Case]:
    """Return transfers of up to 64 groups, many of them empty, of one small tensor each."""
    return cases(max_page=512, groups=st.sampled_from([17, 64]), most_tensors=1)


@st.composite
def _splits(draw, shards: int) -> Split:
    fragments = draw(st.integers(shards, shards + 4))
    order = draw(st.permutations(range(fragments)))
    cuts = sorted(draw(st.permutations(range(1, fragments)))[: shards - 1])
    return Split(
        draw(st.sampled_from([1, 3, 8, 16, 32, 256])),
        tuple(tuple(order[a:b]) for a, b in zip([0, *cuts], [*cuts, fragments], strict=True)),
    )
