"""The rows that copies to and from a GPU are measured with: one rank's pages, and half of two ranks' canonical ones."""

from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.layout.rank_map import RankMap, heads_rank_map

__all__ = ["HEADS", "LAYERS", "RANKS", "TOKENS", "rows_of"]

LAYERS, TOKENS, HEADS, RANKS = 32, 16, 16, 2


def rows_of(page: int, *, canonical: bool) -> tuple[CacheLayout, RankMap | None]:
    """Return the layout of these pages and, for a canonical row, where the first rank's heads lie in it."""
    groups = (KVGroup("full", TOKENS),)
    if not canonical:
        tensors = tuple(KVTensor(f"layer{i}", 0, page) for i in range(LAYERS))
        return CacheLayout(ModelIdentity("bench"), groups, tensors), None
    tensors = tuple(KVTensor(f"layer{i}", 0, page, RANKS * page) for i in range(LAYERS))
    layout = CacheLayout(ModelIdentity("bench"), groups, tensors, world_size=RANKS, row_layout="canonical")
    return layout, heads_rank_map(layout, rank=0, kv_heads=HEADS, tp_rank=0, tp_size=RANKS)
