"""Tensor parallel: the ranks' bytes lie in one row, and engines of different sizes share nothing."""

from .conftest import PROMPTS, WHOLE
from .engines import tiers
from .test_tokens import fs


def test_two_ranks_store_and_load_whole_rows_and_share_nothing_with_one_rank(start, model, tmp_path, right):
    config = tiers(fs(tmp_path / "store"))
    both = start(model, config, tensor_parallel_size=2, distributed_executor_backend="mp")
    assert right(both, *PROMPTS) == [0, 0]
    both.forget()
    assert right(both, *PROMPTS) == WHOLE
    both.shutdown()
    again = start(model, config, tensor_parallel_size=2, distributed_executor_backend="mp")
    assert right(again, *PROMPTS) == WHOLE
    again.shutdown()
    alone = start(model, config)
    assert right(alone, *PROMPTS) == [0, 0]
    assert alone.metrics().get("kvtiers_tier_loaded_chunks{fs}", 0) == 0
    alone.shutdown()
