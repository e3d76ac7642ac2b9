"""Under the whole stack, too, stored bytes that are not what was stored are misses; without the check tokens change."""

from .conftest import PROMPTS, WHOLE
from .engines import BLOCK, whole_stack
from .test_damage import flip, swap, truncate, values, zero
from .test_whole_stack import FIRST, fs


def test_damaged_values_are_misses_and_are_stored_anew(start, model, tmp_path, right):
    store = tmp_path / "store"
    engine = start(model, whole_stack(fs(store)))
    right(engine, *PROMPTS)
    engine.forget()
    assert len(values(store)) == sum(WHOLE) / BLOCK
    for damage in (zero, flip, truncate, swap):
        before = engine.metrics()
        damage(values(store))
        cached = right(engine, *PROMPTS)
        lost = engine.metrics()
        assert sum(cached) < sum(WHOLE), damage.__name__
        assert lost["kvtiers_tier_failed_loads{fs}"] > before.get("kvtiers_tier_failed_loads{fs}", 0), damage.__name__
        assert lost.get("kvtiers_tier_hits{fs}", 0) == before.get("kvtiers_tier_hits{fs}", 0), damage.__name__
        engine.forget()
        assert right(engine, *PROMPTS) == WHOLE, f"{damage.__name__}: what was computed anew is there again"
        engine.forget()
    assert engine.metrics()["kvtiers_tier_seal_failures{fs}"] > 0
    engine.shutdown()


def test_with_the_check_switched_off_the_tokens_are_wrong_so_these_tests_can_fail(start, model, tmp_path, truth):
    store = tmp_path / "store"
    engine = start(model, whole_stack(fs(store, io="thread")))
    engine.generate(FIRST)
    engine.forget()
    engine.do("trust_every_value")
    zero(values(store))
    tokens, cached = engine.generate(FIRST)
    assert cached == [WHOLE[0]]
    assert tokens != [truth[tuple(FIRST)]]
    engine.shutdown()


def test_a_model_of_the_same_name_with_other_weights_shares_nothing(
    start, model, other_model, tmp_path, truth, other_truth
):
    config = whole_stack(fs(tmp_path / "store"))
    first = start(model, config)
    first.generate(*PROMPTS)
    first.shutdown()
    assert other_model.name == model.name
    other = start(other_model, config)
    tokens, cached = other.generate(*PROMPTS)
    assert cached == [0, 0]
    assert tokens == [other_truth[tuple(prompt)] for prompt in PROMPTS]
    assert tokens != [truth[tuple(prompt)] for prompt in PROMPTS]
    other.shutdown()
