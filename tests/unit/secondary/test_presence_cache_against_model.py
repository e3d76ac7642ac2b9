"""Verdicts against a model that keeps, for each chunk, what may be believed of it and since when."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtiers.api import LookupResult, make_offload_key
from kvtiers.secondary.presence_cache import PresenceCache

MISS, HIT, RETRY = LookupResult.MISS, LookupResult.HIT, LookupResult.RETRY
TTL, MISS_SECONDS, DEADLINE = 60.0, 1.0, 30.0
KEYS = [make_offload_key(bytes([number]) * 8, 0) for number in range(12)]

runs = st.tuples(st.integers(0, len(KEYS) - 1), st.integers(1, len(KEYS))).map(lambda ends: KEYS[ends[0] : sum(ends)])


class LookupMachine(RuleBasedStateMachine):
    """The tier really has ``there``; questions are answered late, out of order, in part, or never."""

    def __init__(self):
        super().__init__()
        self.now = 100.0
        self.there = set()
        self.known = {}  # key -> (HIT or MISS, believed until)
        self.sent = {}  # probe -> (keys, answers as of the time of asking, asked at)
        self.void = set()  # (probe, key): something newer is known
        self.tier = PresenceCache(TTL, DEADLINE, lambda: self.now, self.send)

    def send(self, probe_id, keys, is_prefix):
        assert probe_id not in self.sent
        assert keys
        assert len(set(keys)) == len(keys)
        self.sent[probe_id] = (list(keys), [key in self.there for key in keys], self.now)
        return True

    def believed(self, key):
        verdict, until = self.known.get(key, (None, 0.0))
        return verdict if until >= self.now else None

    @rule(keys=runs)
    def ask(self, keys):
        answers = self.tier.ask(keys)
        expected = []
        for key in keys:
            expected.append(self.believed(key) or RETRY)
            if expected[-1] is not HIT:
                break
        assert answers == expected

    @rule()
    def flush(self):
        self.tier.flush()

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def answer(self, data):
        probe = data.draw(st.sampled_from(sorted(self.sent)))
        keys, answers, _ = self.sent.pop(probe)
        count = data.draw(st.integers(0, len(keys)))
        self.tier.answered(probe, bytes(answers[:count]))
        for key, there in zip(keys[:count], answers, strict=False):
            if (probe, key) not in self.void:
                self.learn(key, HIT if there else MISS)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def fail(self, data):
        probe = data.draw(st.sampled_from(sorted(self.sent)))
        keys, _, _ = self.sent.pop(probe)
        self.tier.failed(probe)
        for key in keys:
            if (probe, key) not in self.void:
                self.learn(key, MISS)

    def learn(self, key, verdict):
        self.known[key] = (verdict, self.now + (TTL if verdict is HIT else MISS_SECONDS))

    def learn_all(self, keys, verdict):
        for key in keys:
            self.learn(key, verdict)
            self.void.update((probe, key) for probe in self.sent)

    @rule(keys=runs)
    def store(self, keys):
        self.there.update(keys)
        self.tier.stored(keys)
        self.learn_all(keys, HIT)

    @rule(keys=runs)
    def lose(self, keys):
        self.there.difference_update(keys)
        self.tier.lost(keys)
        self.learn_all(keys, MISS)

    @rule(keys=runs)
    def another_engine_changes(self, keys):
        self.there.symmetric_difference_update(keys)

    @rule(seconds=st.sampled_from([0.1, 0.7, 1.5, 20.0, 70.0]))
    def time_passes(self, seconds):
        self.now += seconds
        overdue = [probe for probe, (_, _, asked) in self.sent.items() if asked + DEADLINE <= self.now]
        assert self.tier.give_up_overdue() == len(overdue)
        for probe in overdue:
            for key in self.sent.pop(probe)[0]:
                if (probe, key) not in self.void:
                    self.learn(key, MISS)

    @rule()
    def clear(self):
        self.tier.clear()
        self.known.clear()
        self.sent.clear()

    @invariant()
    def only_what_is_in_flight_counts_as_asked(self):
        assert self.tier.open_probes == len(self.sent)
        in_flight = {key for keys, _, _ in self.sent.values() for key in keys}
        queued = {key for run in self.tier._runs for key in run}
        assert set(self.tier._asked) <= in_flight | queued

    def teardown(self):
        """No livelock: once everything is answered, a repeated question gets its answer."""
        for probe in sorted(self.sent):
            self.tier.answered(probe, bytes(self.sent[probe][1]))
        self.sent.clear()
        for _ in range(2 * len(KEYS)):
            if RETRY not in self.tier.ask(KEYS):
                break
            self.tier.flush()
            for probe in sorted(self.sent):
                self.tier.answered(probe, bytes(self.sent[probe][1]))
            self.sent.clear()
        else:
            pytest.fail("it goes on asking")


TestLookups = LookupMachine.TestCase
TestLookups.settings = settings(deadline=None, max_examples=150, stateful_step_count=40)
