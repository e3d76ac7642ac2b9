"""The start line, and what it says of tiers that cannot be used, with no request and no step of the engine."""

import dataclasses
import logging
import re
import time
from datetime import UTC, datetime

import pytest
from tests.unit.test_runtime import LAYOUT, MEMORY, config, running

import kvtiers
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.layout.storage_name import StorageNames
from kvtiers.runtime import EngineFacts
from kvtiers.start_line import OFF, StartFacts, StartLine, rows_in_words

WAIT = {"start_wait": "100s"}
"""Tiers have as long as a busy machine needs before the line is written without them."""
WRONG = {**MEMORY, "capacity": "1KiB", "name": "wrong", "breaker": {"delay": "60s"}}


@pytest.fixture
def lines(caplog):
    """Wait until a line with this text is logged, and return all lines."""
    caplog.set_level(logging.INFO, logger="kvtiers")

    def lines(text):
        until = time.monotonic() + 120
        while not any(text in record.getMessage() for record in caplog.records):
            assert time.monotonic() < until, f"no line says {text!r}"
            time.sleep(0.01)
        return [(record.levelname, record.getMessage()) for record in caplog.records]

    return lines


@pytest.mark.parametrize("io", ["thread", "process"])
def test_a_start_is_one_line_with_all_that_it_is(lines, io):
    before = time.time()
    with running(config(**WAIT, namespace="prod", secondary=[{**MEMORY, "io": io, "name": "near"}])):
        (line,) = [text for level, text in lines("is on") if level == "INFO" and "is on" in text]
    since = re.search(r"shared since (\S+) by", line)
    assert since, line
    fingerprint = StorageNames.of_layout("prod", LAYOUT).fingerprint
    assert line == (
        f"kvtiers {kvtiers.__version__} is on, by its Python API; primary 1MiB in 256 rows of 16 tokens; "
        f"tiers: near (memory) in use; namespace 'prod', fingerprint {fingerprint}: "
        f"shared since {since[1]} by all engines with this namespace and fingerprint"
    )
    began, opened, ended = datetime.fromtimestamp(before, UTC), datetime.fromisoformat(since[1]), datetime.now(UTC)
    assert began.replace(microsecond=0) <= opened <= ended
    assert fingerprint in f"{LAYOUT.fingerprint}"


@pytest.mark.parametrize("io", ["thread", "process"])
def test_a_tier_that_cannot_be_used_says_so_at_the_start_though_the_engine_makes_no_step(lines, io):
    tiers = [{**MEMORY, "io": io}, {**WRONG, "io": io}]
    with running(config(**WAIT, secondary=tiers)) as (manager, _, _):
        said = lines("is on")
        warnings = [text for level, text in said if level == "WARNING" and text.startswith("wrong: ")]
        assert len(warnings) == 1
        assert "wrong: out of use:" in warnings[0]
        assert "capacity" in warnings[0], "the reason"
        assert "kvtiers check" in warnings[0], "what to do"
        (line,) = [text for _, text in said if "is on" in text]
        assert "memory (memory) in use, wrong (memory) not usable" in line
        figures = manager.stats()["tiers"]
        assert [figures[name]["own"]["open"] for name in ("memory", "wrong")] == [1, 0]
        assert [figures[name]["own"]["breaker_state"] for name in ("memory", "wrong")] == [0, 0]
        manager.on_schedule_end()
        lines("is on")
        again = [text for _, text in lines("is on") if text.startswith("wrong: out of use")]
        assert len(again) == 1, "the engine's first step does not say it again"


def test_without_a_name_for_the_weights_the_line_says_that_nothing_is_shared(lines):
    with running(config(), dataclasses.replace(LAYOUT, model=ModelIdentity("m"))):
        (line,) = [text for _, text in lines("is on") if "is on" in text]
    assert "tiers: none" in line
    assert line.endswith("shared with no other process")


def test_without_a_tier_in_use_the_line_says_that_nothing_is_shared_yet(lines):
    with running(config(**WAIT, secondary=[WRONG])):
        (line,) = [text for _, text in lines("is on") if "is on" in text]
    assert line.endswith("to be shared by all engines with this namespace and fingerprint once a tier is in use")


def test_without_a_tier_the_line_says_that_nothing_is_shared(lines):
    with running(config()):
        (line,) = [text for _, text in lines("is on") if "is on" in text]
    assert line.endswith("shared with no other process")


def test_no_line_says_that_it_is_on_before_all_ranks_have_joined(lines, caplog):
    manager = kvtiers.open_manager(config(secondary=[WRONG]), LAYOUT)
    try:
        lines("wrong: out of use")
        assert "is on" not in caplog.text
    finally:
        manager.shutdown(1)
    assert "is on" not in caplog.text


class Announced:
    """A tier in this state."""

    def __init__(self, state):
        self.state, self.warned = state, []

    def open_state(self):
        return self.state

    def warn_unusable(self, error):
        self.warned.append(error)


def test_an_engine_whose_tiers_are_off_says_so_in_its_start_line(lines):
    tier = Announced(OFF)
    line = StartLine(StartFacts("by a test", "1MiB", "prod", "", False), {"near": ("fs", tier)})
    (said,) = [text for _, text in lines("is off")]
    line.close()
    assert said == (
        f"kvtiers {kvtiers.__version__} is off, by a test; primary 1MiB; tiers: near (fs) off; "
        "namespace 'prod': nothing is stored or loaded"
    )
    assert not tier.warned, "the reason has been logged where it was found"


def test_rows_are_described_by_their_tokens_and_those_of_a_hybrid_model_by_its_groups_and_checkpoints():
    def layout(*groups, blocks=4):
        tensors = tuple(KVTensor(f"t{number}", number, 64) for number in range(len(groups)))
        return CacheLayout(ModelIdentity("model"), groups, tensors, blocks_per_chunk=blocks)

    full, window = KVGroup("f", 16), KVGroup("w", 16, "sliding_window", 1024)
    assert rows_in_words(layout(full), "here") == "of 64 tokens"
    assert rows_in_words(layout(full, full), "here") == "of 64 tokens (KV groups: 2 with full attention)"
    assert rows_in_words(layout(full, window, window), "here") == (
        "of 64 tokens (KV groups: 1 with full attention, 2 with windows of 1024 tokens; checkpoints: here)"
    )
    assert rows_in_words(layout(window), "here") == (
        "of 64 tokens (KV groups: 1 with windows of 1024 tokens; checkpoints: here)"
    )
    assert rows_in_words(layout(full, KVGroup("s", 544, "state_space"), blocks=1), "here") == (
        "of 16 or 544 tokens (KV groups: 1 with full attention, 1 with states; checkpoints: here)"
    )


@pytest.mark.parametrize(
    ("engine", "checkpoints"),
    [(None, "where the engine keeps blocks of all groups"), (EngineFacts(checkpoints="at the end"), "at the end")],
)
def test_a_hybrid_models_line_says_where_its_checkpoints_are(lines, engine, checkpoints):
    windows = dataclasses.replace(LAYOUT, groups=(KVGroup("g", 16, "sliding_window", 64),))
    with running(config(), windows, engine=engine):
        (line,) = [text for _, text in lines("is on") if "is on" in text]
    assert f"rows of 16 tokens (KV groups: 1 with windows of 64 tokens; checkpoints: {checkpoints}); tiers: " in line
