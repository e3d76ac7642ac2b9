"""The demo's engine, with kvtiers and without: the same tokens, whatever was cached, loaded, or served at once."""

import pytest
from demo.engine import Engine, Request
from demo.pool import BlockPool
from demo.tiered import TieredEngine
from demo.transformer import Size

from kvtiers.types import RequestContext

SIZE = Size(layers=2, width=64, heads=2, hidden=128, vocabulary=256)
DOCUMENT = [(7 * i * i + 3 * i) % 256 for i in range(256)]
CONFIG = {
    "version": 1,
    "primary": {"capacity": "4MiB", "prefault": False},
    "secondary": [{"type": "memory", "capacity": "16MiB", "io": "thread", "required": True}],
    "lookup_wait": "10s",
    "load_wait": "10s",
}


def serve(engine, *prompts, new_tokens=6):
    requests = [
        Request(RequestContext(f"{id(prompts)}-{i}"), [*prompt], new_tokens) for i, prompt in enumerate(prompts)
    ]
    for request in requests:
        engine.submit(request)
    steps = 0
    while not all(request.done for request in requests):
        engine.step()
        steps += 1
        assert steps < 100_000, "the engine does not come to an end"
    return requests


def settle(engine):
    for _ in range(100_000):
        if not engine.busy():
            return
        engine.step()
    pytest.fail("the engine is busy for ever")


@pytest.fixture
def tiered():
    engine = TieredEngine(CONFIG, SIZE, num_blocks=40, piece=64)
    yield engine
    engine.close()


@pytest.fixture
def answers():
    """What is right: each prompt alone, in an engine that has never seen another."""

    def alone(*prompts):
        return [serve(Engine(SIZE, 40, 64), prompt)[0].answer for prompt in prompts]

    return alone


def test_the_prefix_cache_changes_no_token(answers):
    engine = Engine(SIZE, num_blocks=40, piece=64)
    prompts = [[*DOCUMENT, 1, 2, 3], [*DOCUMENT, 4, 5, 6], DOCUMENT]
    served = [serve(engine, prompt)[0] for prompt in prompts]
    assert [request.answer for request in served] == answers(*prompts)
    assert [request.cached for request in served] == [0, 256, 240]


def test_requests_that_are_served_at_once_get_the_tokens_that_each_gets_alone(answers, tiered):
    prompts = [[*DOCUMENT[:100], number] for number in range(5)]
    for engine in (Engine(SIZE, num_blocks=40, piece=64), tiered):
        assert [request.answer for request in serve(engine, *prompts)] == answers(*prompts)


def test_a_request_waits_while_there_are_too_few_blocks(answers):
    engine = Engine(SIZE, num_blocks=18, piece=64)
    prompts = [[*DOCUMENT, 1], [9, *DOCUMENT]]
    assert [request.answer for request in serve(engine, *prompts)] == answers(*prompts)


def test_what_was_computed_once_is_loaded_from_primary_and_tier(answers, tiered):
    prompts = [[*DOCUMENT, number] for number in range(3)]
    right = answers(*prompts)
    (first,) = serve(tiered, prompts[0])
    assert (first.answer, first.loaded) == (right[0], 0)
    serve(tiered, [5] * 630)  # its own cache has the document no longer
    tiered.steps.clear()
    (second,) = serve(tiered, prompts[1])
    assert (second.answer, second.cached, second.loaded) == (right[1], 0, 256)
    # Not a token of it was computed: only the one behind it, and the answer's.
    assert [step.work for step in tiered.steps if step.work] == [((at, 1),) for at in range(256, 262)]
    settle(tiered)
    serve(tiered, [6] * 630)
    settle(tiered)
    tiered.scheduler.reset_cache()  # the primary has nothing any more
    (third,) = serve(tiered, prompts[2])
    assert (third.answer, third.cached, third.loaded) == (right[2], 0, 256)
    assert tiered.manager.stats()["tiers"]["memory"]["hits"] == 4


def test_steps_say_what_they_computed():
    engine = Engine(SIZE, num_blocks=40, piece=64)
    serve(engine, DOCUMENT[:150], new_tokens=3)
    work = [step.work for step in engine.steps]
    assert work == [((0, 64),), ((64, 64),), ((128, 22),), ((150, 1),), ((151, 1),)]
    assert all(0 < step.computing <= step.seconds for step in engine.steps)


# -- the pool


def test_a_block_that_is_held_is_not_handed_out():
    pool = BlockPool(4)
    blocks = pool.allocate([], 3)
    pool.hold(blocks[:1])
    pool.release(blocks)
    assert pool.allocate([], 4) is None
    assert sorted(pool.allocate([], 3)) == sorted({0, 1, 2, 3} - {blocks[0]})


def test_a_block_is_found_until_it_is_reused_and_the_end_of_a_prefix_goes_first():
    pool = BlockPool(4)
    blocks = pool.allocate([], 4)
    hashes = [b"a", b"b", b"c", b"d"]
    pool.publish(hashes, blocks)
    pool.release(blocks)
    assert pool.match(hashes) == 4
    assert pool.allocate([], 1) == [blocks[3]]
    assert pool.match(hashes) == 3
    assert pool.allocate(hashes[:3], 4) is None
    assert pool.allocate(hashes[:2], 3) == [*blocks[:2], blocks[2]]
    assert pool.match(hashes) == 2


def test_cached_blocks_that_are_free_do_not_count_twice():
    pool = BlockPool(3)
    blocks = pool.allocate([], 2)
    pool.publish([b"a", b"b"], blocks)
    pool.release(blocks)
    assert pool.allocate([b"a", b"b"], 4) is None
    assert pool.match([b"a", b"b"]) == 2
    assert pool.allocate([b"a", b"b"], 3) == [*blocks, 2]
