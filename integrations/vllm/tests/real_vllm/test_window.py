"""A model of which every other layer sees a window: two KV groups, whose chunks are had back together or not at all."""

import pytest

from .conftest import PROMPTS
from .engines import BLOCK, TWO_RANKS
from .models import make_window_model
from .ways import fs, whole_stack


@pytest.fixture(scope="module")
def window_model(tmp_path_factory):
    return make_window_model(tmp_path_factory.mktemp("window") / "tiny", seed=0, window=96)


@pytest.fixture(scope="module")
def plain(window_model, start_any):
    """The tokens without any connector."""
    engine = start_any(window_model)
    tokens, cached = engine.generate(*PROMPTS)
    assert cached == [0, 0]
    engine.shutdown()
    return tokens


@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
def test_a_model_with_a_sliding_window_has_its_groups_back_together(
    start, window_model, plain, tmp_path, way, blocks_per_chunk
):
    chunk = BLOCK * blocks_per_chunk
    whole = [len(prompt) // chunk * chunk for prompt in PROMPTS]
    config = way(fs(tmp_path / "store"), blocks_per_chunk=blocks_per_chunk)
    first = start(window_model, config)
    assert first.generate(*PROMPTS) == (plain, [0, 0])
    first.forget()
    assert first.generate(*PROMPTS) == (plain, whole)
    first.shutdown()
    second = start(window_model, config)
    assert second.generate(*reversed(PROMPTS)) == (plain[::-1], whole[::-1])
    for group in ("00000000", "00000001"):
        assert list((tmp_path / "store").rglob(f"*{group}")), "values of both groups were stored"
    second.shutdown()


def test_two_ranks_have_a_models_groups_back_together_too(start, window_model, plain, tmp_path):
    whole = [len(prompt) // BLOCK * BLOCK for prompt in PROMPTS]
    both = start(window_model, whole_stack(fs(tmp_path / "store")), **TWO_RANKS)
    assert both.generate(*PROMPTS) == (plain, [0, 0])
    both.forget()
    assert both.generate(*reversed(PROMPTS)) == (plain[::-1], whole[::-1])
    both.shutdown()
