"""The manager's machine with prefetches and hints besides all else that it does: the same invariants hold.

Among the rules: every readable chunk has its own bytes, each row has one owner, no count is wrong, no row is lost.
"""

import dataclasses
import logging

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from kvtiers.types import RequestContext

from .test_manager_against_model import DOCUMENTS, WINDOWS, ManagerAgainstModel, pieces, tier_options


class ManagerWithPrefetches(ManagerAgainstModel):
    @initialize(
        rows=st.integers(1, 40),
        options=st.tuples(tier_options, tier_options),
        load_wait=st.sampled_from([0.1, None]),
        policy=st.sampled_from(["lru", "arc", "turn-hazard"]),
        starts=st.tuples(st.booleans(), st.booleans()),
        job_rows=st.sampled_from([2, 1000]),
        shareable=st.booleans(),
    )
    def begin(self, rows, options, load_wait, policy, starts, job_rows, shareable):
        super().begin(rows, options, load_wait, policy, starts, job_rows)
        self.numbers = []
        first = self.bench.slots[0]
        first.options = dataclasses.replace(first.options, shareable=shareable)

    @rule(piece=pieces, allowed=st.sampled_from([None, [], ["y"]]))
    def prefetch(self, piece, allowed):
        document, first, count = piece
        ctx = None if allowed is None else RequestContext("p", {"kv_load_tiers": allowed})
        self.manager.prefetch(DOCUMENTS[document][first : first + count], ctx)

    @rule(tier=st.sampled_from("xy"), piece=pieces, most=st.sampled_from([None, 32.0]))
    def warm_up(self, tier, piece, most):
        warm_ups = self.manager.warm_ups
        if (
            not self.manager.tier_commands.slot(tier).retired
            and not self.manager.tier_commands.slot(tier).metrics.switched_off
            and len(self.numbers) < 3
        ):
            document, first, count = piece
            number = warm_ups.begin(tier, 1e6, most)["id"]
            runs = [each[document][first : first + count] for each in (DOCUMENTS, WINDOWS)]
            warm_ups.give(number, runs, continues=False, is_last=True)
            self.numbers.append(number)

    @rule()
    def end_warm_ups(self):
        for number in self.numbers:
            if self.manager._prefetches.find(number) is not None:
                self.manager.warm_ups.end(number)
        self.numbers.clear()

    @rule(piece=pieces, hints=st.sampled_from([{"ttl": 1}, {"ttl": "1h", "priority": "high"}, {"priority": "low"}]))
    def request_with_hints(self, piece, hints):
        ctx = RequestContext(f"r{next(self.names)}", hints)
        self.manager.on_new_request(ctx)
        self.open_requests.append(ctx)
        self.all_requests.append(ctx)
        document, first, count = piece
        self.bench.lookup(DOCUMENTS[document][first : first + count], ctx)

    def teardown(self):
        if hasattr(self, "bench"):
            self.end_warm_ups()
            self.step(31.0, 0)
        super().teardown()


ManagerWithPrefetches.TestCase.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)
TestManagerWithPrefetches = ManagerWithPrefetches.TestCase


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.CRITICAL, "kvtiers.tiering")
