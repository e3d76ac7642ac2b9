"""A tier that two threads ask: a question from beside comes between two calls of the engine's, never into one."""

import threading
from types import SimpleNamespace

import pytest

from kvtiers.secondary.store_tier import ChunkStoreTier
from kvtiers.tiering.tier_slot import TierOptions, TierSlot
from kvtiers.types import RequestContext
from kvtiers_vllm.own_tiering.build import OffTier
from kvtiers_vllm.own_tiering.locked_tier import LockedTier

KEY = bytes(36)
JOB = SimpleNamespace(is_promotion=True)


class CalledTier(ChunkStoreTier):
    """In each call another thread asks; ``calls`` of the tier, in order."""

    def __init__(self):
        self.calls = []
        self.asked = None

    def is_available(self):
        return True

    def announce(self, keys):
        self.calls.append("announce")


def _called(name, answer):
    def call(self, *_arguments):
        self.calls.append(name)
        self.asked.announce([KEY])
        return answer

    return call


ANSWERS = {
    "lookup_many": (),
    "submit_load": None,
    "poll": (),
    "release_job": None,
    "abandon_job": None,
    "on_schedule_end": None,
    "drain": True,
}
for _name, _answer in ANSWERS.items():
    setattr(CalledTier, _name, _called(_name, _answer))


@pytest.mark.parametrize(
    ("call", "calls"),
    [
        (lambda asked: asked.ask(KEY, RequestContext("a")), ["lookup_many"]),
        (lambda asked: asked.submit(JOB), ["submit_load"]),
        (lambda asked: asked.poll(), ["poll"]),
        (lambda asked: asked.release(1), ["release_job"]),
        (lambda asked: asked.abandon(1), ["abandon_job"]),
        (lambda asked: asked.end_step(), ["on_schedule_end"]),
        (lambda asked: asked.drain(1.0), ["drain"]),
    ],
    ids=["ask", "submit", "events", "release", "abandon", "end_step", "drain"],
)
def test_no_probe_is_sent_while_the_tier_is_in_a_call_and_any_after_it(call, calls):
    tier = CalledTier()
    tier.asked = LockedTier(TierSlot(0, tier, TierOptions("near")))
    call(tier.asked)
    assert tier.calls == calls
    tier.asked.announce([KEY])
    assert tier.calls == [*calls, "announce"]


def test_a_tier_whose_loads_cannot_release_their_rows_is_not_asked_to():
    asked = LockedTier(TierSlot(0, OffTier(), TierOptions("near")))
    asked.release(1)
    assert list(asked.poll()) == []


def test_a_tier_is_left_after_its_last_question():
    tier, order = CalledTier(), []
    inside, go_on = threading.Event(), threading.Event()

    def announce(keys):
        inside.set()
        go_on.wait(10)
        order.append("asked")

    tier.announce = announce
    slot = TierSlot(0, tier, TierOptions("near"))
    asked = LockedTier(slot)
    asker = threading.Thread(target=asked.announce, args=([KEY],))
    leaver = threading.Thread(target=lambda: (asked.leave(), order.append("left")))
    asker.start()
    assert inside.wait(10)
    leaver.start()
    leaver.join(0.2)
    go_on.set()
    asker.join(10)
    leaver.join(10)
    assert order == ["asked", "left"]
    assert slot.retired
