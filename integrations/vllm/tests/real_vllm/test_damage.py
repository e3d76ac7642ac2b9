"""Stored bytes that are not what was stored are misses, and the tokens stay right; without the check they would not."""

import pytest

from .conftest import CHUNKS, PROMPTS, WHOLE
from .servers import Directory
from .test_releases import in_every_release

FIRST, _ = PROMPTS


def zero(values):
    return [bytes(len(value)) for value in values]


def flip(values):
    return [value[:at] + bytes([value[at] ^ 0x40]) + value[at + 1 :] for value in values for at in [len(value) // 3]]


def flip_each(values):
    """Flip a bit in the exponent of every number."""
    return [bytes(byte ^ 0x40 if at % 4 == 3 else byte for at, byte in enumerate(value)) for value in values]


def truncate(values):
    return [value[: len(value) // 2] for value in values]


def swap(values):
    """Give each value's bytes to another name; to attention, a prompt's own values are the same in any order."""
    return values[1:] + values[:1]


@pytest.fixture(scope="module", params=["fs", *in_every_release("redis", "s3")])
def server(request, tmp_path_factory):
    """The store; ``tests/corruptions`` damages the values of each tier kind each time."""
    if request.param == "fs":
        return Directory(tmp_path_factory.mktemp("damage"))
    return request.getfixturevalue({"redis": "redis", "s3": "gateway"}[request.param])


def spoil(server, tier, damage):
    values = server.values(tier)
    server.put(tier, dict(zip(values, damage(list(values.values())), strict=True)))


@pytest.fixture(scope="module")
def tier(server, way):
    """A tier of each engine in turn, of either way in; what one tier host reads another may write."""
    return server.tier(required=True, processes=4)


@pytest.fixture(scope="module")
def engine(start_any, model, server, tier, right, way):
    """An engine that has stored the prompts."""
    engine = start_any(model, way(tier))
    right(engine, *PROMPTS)
    engine.forget()
    assert len(server.values(tier)) == CHUNKS
    yield engine
    engine.kill()


@pytest.mark.parametrize("damage", [zero, flip, flip_each, truncate, swap])
def test_damaged_values_are_misses_and_are_stored_again(engine, server, tier, right, damage):
    failed, loaded = f"kvtiers_tier_failed_loads{{{server.kind}}}", f"kvtiers_tier_loaded_chunks{{{server.kind}}}"
    before = engine.metrics()
    spoil(server, tier, damage)
    cached = right(engine, *PROMPTS)
    after = engine.metrics()
    assert cached == [0, 0]
    assert after[failed] > before.get(failed, 0)
    assert after.get(loaded, 0) == before.get(loaded, 0)
    seal_failures = [figures.get(f"kvtiers_tier_seal_failures{{{server.kind}}}", 0) for figures in (before, after)]
    assert (seal_failures[1] > seal_failures[0]) == (damage is not truncate), "what has another length has no seal"
    engine.forget()
    assert right(engine, *PROMPTS) == WHOLE, "what was computed again is there again"
    engine.forget()


def test_with_the_check_switched_off_the_tokens_are_wrong_so_these_tests_can_fail(
    start, model, server, truth, right, way
):
    # Of another length nothing is read, checked or not; one bit of one number need not change a token.
    tier = server.tier(required=True, io="thread")
    engine = start(model, way(tier))
    engine.generate(*PROMPTS)
    engine.forget()
    engine.do("trust_every_value")
    stored = server.values(tier)
    for damage in (zero, flip_each, swap):
        spoil(server, tier, damage)
        tokens, cached = engine.generate(*PROMPTS)
        assert cached == WHOLE
        assert tokens[0] != truth[tuple(FIRST)], damage.__name__
        server.put(tier, stored)
        engine.forget()
    assert right(engine, *PROMPTS) == WHOLE, "it was the damage"
    engine.shutdown()


def test_a_model_of_the_same_name_with_other_weights_shares_nothing(
    engine, server, tier, start, other_model, model, truth, other_truth, way
):
    assert len(server.values(tier)) == CHUNKS, "the engine's"
    assert other_model.name == model.name
    other = start(other_model, way(tier))
    tokens, cached = other.generate(*PROMPTS)
    assert cached == [0, 0]
    assert tokens == [other_truth[tuple(prompt)] for prompt in PROMPTS]
    assert tokens != [truth[tuple(prompt)] for prompt in PROMPTS]
    other.shutdown()
    assert len(server.values(tier)) == 2 * CHUNKS, "each has its own"
