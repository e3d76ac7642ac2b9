"""What an engine gets wrong costs it that call, and takes no tier out of use."""

import pytest

from kvtiers.types import PromptGroup


@pytest.mark.parametrize("bad", [b"", b"\0\0\0\0", b"x" * 65_532 + bytes(4)], ids=["empty", "a group alone", "long"])
def test_a_key_of_a_length_that_none_has_is_misuse_and_the_tier_goes_on(start, faulty, machine, bad):
    engine = start(faulty())
    engine.until_available()
    wanted = machine.keys(0, 8)
    engine.store(wanted)
    engine.forget()
    ctx = engine.request()
    assert engine.lookup([bad], ctx).tokens == 0
    assert engine.manager.reach([PromptGroup(wanted), PromptGroup([bad], 1)], ctx).tokens == 0
    assert engine.manager.prepare_store([*machine.keys(50, 2), bad], ctx) is None
    engine.manager.announce([PromptGroup([bad])])
    assert engine.resolve([*wanted, bad], ctx) == 8, "what comes before it is found"
    engine.manager.on_request_finished(ctx)
    engine.forget()
    assert engine.load(wanted) == 8
    assert engine.manager.stats()["engine"]["misuse"] >= 5
    assert engine.own()["host_starts"] == 1
    assert engine.figures()["raised"] == 0


def test_the_shortest_key_goes_all_the_way(start, faulty):
    engine = start(faulty())
    engine.until_available()
    shortest = b"x\0\0\0\0"
    engine.store([shortest])
    engine.forget()
    assert engine.load([shortest]) == 1
