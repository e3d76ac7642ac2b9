"""Stored bytes that are not what was stored are misses, and the tokens stay right; without the check they would not."""

from pathlib import Path

import pytest

from .conftest import PROMPTS, WHOLE
from .engines import BLOCK, Engine, tiers
from .test_tokens import fs

FIRST, _ = PROMPTS


def values(store: Path) -> list[Path]:
    """Return the files of the values in a directory tier, in the order of their names."""
    return sorted(path for path in store.rglob("*00000000") if path.is_file())


def zero(files):
    for file in files:
        file.write_bytes(bytes(file.stat().st_size))


def flip(files):
    for file in files:
        data = bytearray(file.read_bytes())
        data[len(data) // 3] ^= 0x40
        file.write_bytes(data)


def truncate(files):
    for file in files:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def swap(files):
    contents = [file.read_bytes() for file in files]
    for file, content in zip(files, contents[1:] + contents[:1], strict=True):
        file.write_bytes(content)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("damage") / "store"


@pytest.fixture(scope="module")
def engine(start_any, model, store, right):
    """An engine that has stored the prompts."""
    engine = start_any(model, tiers(fs(store)))
    right(engine, *PROMPTS)
    engine.forget()
    assert len(values(store)) == sum(WHOLE) / BLOCK
    yield engine
    engine.kill()


def test_damaged_values_are_misses_and_are_stored_anew(engine, store, right):
    for damage in (zero, flip, truncate, swap):
        before = engine.metrics()
        damage(values(store))
        cached = right(engine, *PROMPTS)
        lost = engine.metrics()
        assert sum(cached) < sum(WHOLE), damage.__name__
        assert lost["kvtiers_tier_failed_loads{fs}"] > before.get("kvtiers_tier_failed_loads{fs}", 0), damage.__name__
        assert lost.get("kvtiers_tier_loaded_chunks{fs}", 0) == before.get("kvtiers_tier_loaded_chunks{fs}", 0)
        engine.forget()
        assert right(engine, *PROMPTS) == WHOLE, f"{damage.__name__}: what was computed anew is there again"
        engine.forget()
    assert engine.metrics()["kvtiers_tier_seal_failures{fs}"] > 0


def test_with_the_check_switched_off_the_tokens_are_wrong_so_these_tests_can_fail(start, model, tmp_path, truth):
    store = tmp_path / "store"
    engine: Engine = start(model, tiers(fs(store, io="thread")))
    engine.generate(FIRST)
    engine.forget()
    engine.do("trust_every_value")
    zero(values(store))
    tokens, cached = engine.generate(FIRST)
    assert cached == [WHOLE[0]]
    assert tokens != [truth[tuple(FIRST)]]


def test_a_model_of_the_same_name_with_other_weights_shares_nothing(
    engine, store, start, other_model, model, truth, other_truth
):
    assert values(store), "the engine's"
    assert other_model.name == model.name
    other = start(other_model, tiers(fs(store)))
    tokens, cached = other.generate(*PROMPTS)
    assert cached == [0, 0]
    assert tokens == [other_truth[tuple(prompt)] for prompt in PROMPTS]
    assert tokens != [truth[tuple(prompt)] for prompt in PROMPTS]
    other.shutdown()
