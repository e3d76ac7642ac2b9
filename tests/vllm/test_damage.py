"""Stored bytes that are not what was stored are misses, and the tokens stay right; without the check they would not."""

from pathlib import Path

import pytest

from .conftest import CHUNKS, PROMPTS, WHOLE
from .ways import fs

FIRST, _ = PROMPTS
FAILED, LOADED = "kvtiers_tier_failed_loads{fs}", "kvtiers_tier_loaded_chunks{fs}"


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
def store(tmp_path_factory, way):
    return tmp_path_factory.mktemp(f"damage-{way.__name__}") / "store"


@pytest.fixture(scope="module")
def engine(start_any, model, store, right, way):
    """An engine that has stored the prompts."""
    engine = start_any(model, way(fs(store)))
    right(engine, *PROMPTS)
    engine.forget()
    assert len(values(store)) == CHUNKS
    yield engine
    engine.kill()


@pytest.mark.parametrize("damage", [zero, flip, truncate, swap])
def test_damaged_values_are_misses_and_are_stored_anew(engine, store, right, damage):
    before = engine.metrics()
    damage(values(store))
    cached = right(engine, *PROMPTS)
    after = engine.metrics()
    assert cached == [0, 0]
    assert after[FAILED] > before.get(FAILED, 0)
    assert after.get(LOADED, 0) == before.get(LOADED, 0)
    engine.forget()
    assert right(engine, *PROMPTS) == WHOLE, "what was computed anew is there again"
    assert engine.metrics()["kvtiers_tier_seal_failures{fs}"] > 0
    engine.forget()


def test_with_the_check_switched_off_the_tokens_are_wrong_so_these_tests_can_fail(start, model, tmp_path, truth, way):
    store = tmp_path / "store"
    engine = start(model, way(fs(store, io="thread")))
    engine.generate(FIRST)
    engine.forget()
    engine.do("trust_every_value")
    zero(values(store))
    tokens, cached = engine.generate(FIRST)
    assert cached == [WHOLE[0]]
    assert tokens != [truth[tuple(FIRST)]]
    engine.shutdown()


def test_a_model_of_the_same_name_with_other_weights_shares_nothing(
    engine, store, start, other_model, model, truth, other_truth, way
):
    assert len(values(store)) == CHUNKS, "the engine's"
    assert other_model.name == model.name
    other = start(other_model, way(fs(store)))
    tokens, cached = other.generate(*PROMPTS)
    assert cached == [0, 0]
    assert tokens == [other_truth[tuple(prompt)] for prompt in PROMPTS]
    assert tokens != [truth[tuple(prompt)] for prompt in PROMPTS]
    other.shutdown()
    assert len(values(store)) == 2 * CHUNKS, "each has its own"
