"""A tier under another manager: every job is reported once, when nothing touches its rows; no request waits."""

import gc
import threading
import time
from dataclasses import dataclass

import pytest
from tests.stores import DictStore

from kvtiers.api import LookupResult, TierConfig, make_offload_key
from kvtiers.host.bounce_buffers import value_views
from kvtiers.layout.storage_name import StorageNames
from kvtiers.secondary.host_pool import HostPool, PooledHost
from kvtiers.secondary.in_process import InProcessBackend
from kvtiers.secondary.store_tier import ChunkStoreTier
from kvtiers.tiering.load_or_recompute import LATE, LOOKUP
from kvtiers.tiering.tier_slot import TierOptions, TierSlot
from kvtiers_vllm.own_tiering.tier_driver import TierDriver

HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
ROW, VALUE, ROWS = 4096, 8192, 16
NAMES = StorageNames("test/model-0123456789abcdef01234567/", b"layout-1")
KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(8)]
PATIENCE = 60.0
LOOKUP_WAIT = 0.02


class Store(DictStore):
    """Calls wait while ``gate`` is shut; ``broken``: calls fail."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.broken = False
        self.reading = threading.Event()

    def _enter(self):
        assert self.gate.wait(PATIENCE)
        if self.broken:
            raise OSError("no backend")

    def read_into(self, name, dst):
        self.reading.set()
        self._enter()
        return super().read_into(name, dst)

    def write(self, name, src):
        self._enter()
        super().write(name, src)

    def exists(self, names):
        self._enter()
        return super().exists(names)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@dataclass(eq=False)
class Arrived:
    """A request as the engine holds it."""

    request_id: str
    num_prompt_tokens: int = 0


class Bench:
    """A driver, its store, the rows, and the time."""

    def __init__(self, load_wait=None, tokens_per_chunk=(32,), **options):
        self.memory = bytearray(ROWS * ROW)
        self.store = Store()
        self.clock = Clock()
        self.closed = []
        self.results = []
        self.rests = []
        self.idle_when = lambda: False
        self.while_it_rests = lambda _seconds: None
        config = TierConfig(type="test", retries=0, **options)
        sizes = [(ROW, VALUE)] * 2
        views = value_views(memoryview(self.memory), ROW, VALUE)
        backend = InProcessBackend(config, lambda: self.store, views, NAMES, sizes)
        self.tier = ChunkStoreTier(config, HostPool([PooledHost("t", backend)]), self.clock)
        assert self.tier.wait_open(PATIENCE) == ""
        self.slot = TierSlot(0, self.tier, TierOptions("test", config.read_only, deadline=config.deadline))
        self.driver = TierDriver(
            self.slot,
            LOOKUP_WAIT,
            self.close,
            tokens_per_chunk,
            load_wait,
            self.clock,
            self.rest,
            self.is_idle,
        )
        self.driver.request_started("a", None)
        self.until(self.slot.available)

    def is_idle(self):
        return self.idle_when()

    def rest(self, seconds):
        self.rests.append(seconds)
        self.while_it_rests(seconds)

    def close(self, seconds):
        self.closed.append(seconds)
        self.tier.close()

    def until(self, condition):
        """Step until a condition holds."""
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end
            self.step()
            time.sleep(0.001)

    def step(self):
        self.results += self.driver.finished()
        self.driver.end_step()

    def result(self, job_id):
        self.until(lambda: any(result.job_id == job_id for result in self.results))
        (found,) = [result for result in self.results if result.job_id == job_id]
        return found

    def lookup(self, key, request="a"):
        """Ask until the tier has answered."""
        answers = []
        self.until(lambda: answers.append(self.driver.lookup(key, request)) or answers[-1] is not RETRY)
        return answers[-1]

    def fill(self, row):
        self.memory[row * ROW : (row + 1) * ROW] = bytes([row + 1]) * ROW

    def store_rows(self, keys, rows, job_id=1):
        for row in rows:
            self.fill(row)
        self.driver.submit(job_id, keys, rows, "a", is_promotion=False)
        return self.result(job_id)


@pytest.fixture
def load_wait():
    """Seconds that a request waits for loads; None: auto."""
    return 1e6


@pytest.fixture
def tokens_per_chunk():
    """By KV group."""
    return [32]


@pytest.fixture
def bench(load_wait, tokens_per_chunk):
    bench = Bench(load_wait, tokens_per_chunk)
    yield bench
    bench.store.gate.set()
    bench.driver.close(PATIENCE)


def test_what_was_stored_is_found_and_comes_back(bench):
    assert bench.lookup(KEYS[0]) is MISS
    stored = bench.store_rows(KEYS[:2], [3, 5])
    assert (stored.success, stored.nbytes) == (True, 2 * VALUE)
    assert bench.lookup(KEYS[1]) is HIT
    bench.driver.submit(2, KEYS[:2], [7, 8], "a", is_promotion=True)
    assert bench.result(2).success
    assert bench.memory[7 * ROW] == 4
    assert bench.memory[9 * ROW - 1] == 6
    assert bench.driver.metrics.loaded_chunks == 2
    assert not bench.driver.has_jobs()


def test_seconds_saved_are_those_that_computing_takes_less_those_of_loading(bench):
    driver, metrics = bench.driver, bench.driver.metrics
    computed(bench, "z", 640, 6.4)
    bench.store_rows(KEYS[:2], [3, 5])
    assert (metrics.computing_seconds, metrics.saved_seconds) == (0.0, 0.0)
    driver.submit(2, KEYS[:2], [7, 8], "a", is_promotion=True)
    assert bench.result(2).success
    assert driver.loaded_tokens == 64
    assert metrics.computing_seconds == 0.0, "it is not begun yet"
    driver.end_step(["a"])
    assert metrics.computing_seconds == pytest.approx(64 * 0.01)
    assert metrics.saved_seconds == pytest.approx(64 * 0.01 - metrics.load_seconds)
    for _ in range(20):  # the engine becomes slower
        computed(bench, "b", 640, 64.0)
    driver.end_step(["a"])
    assert metrics.computing_seconds == pytest.approx(64 * 0.01), "priced once, when it was begun"


@pytest.mark.parametrize("tokens_per_chunk", [[32, 32]])
def test_the_windows_of_a_prompt_save_no_tokens_of_their_own_and_their_loads_took_time(bench):
    driver, metrics = bench.driver, bench.driver.metrics
    computed(bench, "z", 640, 6.4)
    window = [make_offload_key(bytes([number]) * 32, 1) for number in range(2)]
    bench.store_rows([*KEYS[:4], *window], range(6))
    driver.submit(2, KEYS[:4], range(6, 10), "a", is_promotion=True)
    assert bench.result(2).success
    driver.submit(3, window, [10, 11], "a", is_promotion=True)
    assert bench.result(3).success
    assert driver.loaded_tokens == 128
    driver.end_step(["a"])
    assert metrics.computing_seconds == pytest.approx(128 * 0.01)
    loading = 6 * bench.slot.rate.seconds_per_chunk
    assert metrics.saved_seconds == pytest.approx(128 * 0.01 - loading)


def computed(bench, request, tokens, seconds, position=0.0):
    """Let the engine compute so many new tokens of a request, in one step."""
    bench.driver.end_step([request])
    bench.clock.now += seconds
    bench.driver.end_step()
    bench.driver._prefill.computed(request, tokens, position)
    bench.driver.end_step()


@pytest.mark.parametrize("tokens_per_chunk", [[32, 640]])
def test_what_a_load_saved_is_priced_where_its_tokens_are_in_the_prompt(bench):
    """vLLM's own prefix cache and its primary may have had what is before them."""
    driver, clock = bench.driver, bench.clock
    bench.store_rows(KEYS[:4], range(4))
    ends = dict(zip(KEYS, range(2032, 2032 + 8 * 32, 32), strict=True)).get
    wide = [make_offload_key(bytes(32), 1)]
    for number, start in enumerate([0, 500, 1000, 1500, 2000]):  # computed: the further in, the dearer
        driver.end_step([f"p{number}"])
        clock.now += 640 * (0.01 + start * 0.00001)
        driver.end_step()
        driver.submit(10 + number, wide, [9], f"p{number}", is_promotion=False, ends=lambda _, end=start + 320: end)
        bench.result(10 + number)
        driver.end_step()
    driver.submit(2, KEYS[:2], [7, 8], "a", is_promotion=True, ends=ends)
    assert bench.result(2).success
    driver.end_step(["a"])
    first = driver.metrics.computing_seconds
    assert first == pytest.approx(64 * (0.01 + 2000 * 0.00001), rel=0.05), "by position 2000, and not 32"
    driver.submit(3, [KEYS[3]], [7], "a", is_promotion=True, ends=lambda _key: 1016)
    assert bench.result(3).success
    driver.end_step(["a"])
    assert driver.metrics.computing_seconds - first == pytest.approx(32 * (0.01 + 1000 * 0.00001), rel=0.05)


@pytest.mark.parametrize("tokens_per_chunk", [[32, 64]])
def test_of_several_groups_the_position_is_that_of_the_group_with_the_most_tokens(bench):
    keys = [make_offload_key(bytes([number]) * 32, group) for number in range(3) for group in (0, 1)]
    ends = {key: 64 * (1 + number // 2) if number % 2 else 7 for number, key in enumerate(keys)}.get
    assert bench.driver._ledger.extent(keys, ends) == (192, 64 * 2 - 32)
    assert bench.driver._ledger.extent(keys, before=100) == (192, 100 + 96), "where vLLM does not say it"


def test_a_load_that_failed_in_part_says_which_chunks_landed_and_the_others_are_misses_for_their_request(bench):
    bench.store_rows(KEYS[:3], [0, 1, 2])
    name = NAMES.name(KEYS[1])
    bench.store.values[name] = bytes(VALUE)
    bench.driver.submit(2, KEYS[:3], [4, 5, 6], "a", is_promotion=True)
    result = bench.result(2)
    assert not result.success
    assert list(result.successful_keys) == [KEYS[0], KEYS[2]]
    bench.store_rows([KEYS[1]], [1], job_id=3)
    assert bench.driver.lookup(KEYS[1], "a") is MISS, "else a request could ask, load and lose for ever"
    bench.driver.request_started("b", None)
    assert bench.lookup(KEYS[1], "b") is HIT


def test_a_request_waits_no_longer_than_lookup_wait_for_all_its_answers_together(bench):
    bench.store.gate.clear()
    assert bench.driver.lookup(KEYS[0], "a") is RETRY
    bench.clock.now += 10.0
    assert bench.driver.lookup(KEYS[0], "a") is RETRY, "the question leaves with the end of the step"
    bench.driver.end_step()
    bench.clock.now += 0.019
    assert bench.driver.lookup(KEYS[0], "a") is RETRY
    assert bench.driver.lookup(KEYS[1], "a") is RETRY
    bench.clock.now += 0.002
    assert bench.driver.lookup(KEYS[0], "a") is MISS
    assert bench.driver.lookup(KEYS[1], "a") is MISS, "its time began with the first answer that made it wait"
    assert bench.driver.metrics.wait_expired == 2
    bench.driver.request_started("b", None)
    assert bench.driver.lookup(KEYS[1], "b") is RETRY


@pytest.mark.parametrize("load_wait", [None])
def test_a_long_prompt_waits_longer_for_answers_where_computing_it_takes_long(bench):
    computed(bench, "z", 640, 6.4)
    shown = Arrived("b", 3200)
    bench.driver.expect(shown)
    bench.driver.request_started("b", None)
    bench.store.gate.clear()
    assert bench.driver.lookup(KEYS[0], "b") is RETRY
    bench.driver.end_step()
    bench.clock.now += LOOKUP * 3200 * 0.01 - 0.001
    assert bench.driver.lookup(KEYS[0], "b") is RETRY
    bench.clock.now += 0.002
    assert bench.driver.lookup(KEYS[0], "b") is MISS


@pytest.mark.parametrize("load_wait", [None])
def test_a_load_that_computing_overtakes_releases_its_rows_and_its_request_loads_no_more(bench):
    computed(bench, "z", 640, 6.4)
    bench.store_rows(KEYS[:2], [3, 5])
    assert bench.lookup(KEYS[1]) is HIT
    bench.slot.rate.add(10, 0.1, bench.clock.now)
    bench.store.gate.clear()
    bench.driver.submit(2, KEYS[:1], [7], "a", is_promotion=True)
    bench.clock.now += 0.1
    bench.step()
    assert bench.driver.has_jobs()
    bench.slot.rate.add(64, 64.0, bench.clock.now)
    assert not bench.result(2).success
    assert (bench.driver.metrics.recomputed_cheaper, bench.driver.metrics.wait_expired) == (1, 0)
    assert bench.driver.lookup(KEYS[1], "a") is MISS
    bench.store.gate.set()


def test_a_job_that_hangs_is_reported_only_when_its_rows_are_free(bench):
    bench.store_rows([KEYS[0]], [0])
    bench.store.gate.clear()
    bench.driver.submit(2, [KEYS[0]], [5], "a", is_promotion=True)
    bench.until(lambda: bench.driver._ledger.jobs[2].started is not None)
    bench.clock.now += 31
    bench.until(lambda: bench.driver.metrics.quarantined_rows == 1)
    bench.clock.now += 300
    for _ in range(50):
        bench.results += bench.driver.finished()
    assert not [result for result in bench.results if result.job_id == 2]
    assert bench.driver.metrics.expired_jobs == 1
    bench.store.gate.set()
    bench.result(2)
    assert bench.driver.metrics.quarantined_rows == 0


def test_a_tier_whose_breaker_is_open_misses_and_takes_nothing(bench):
    bench.store.broken = True
    for job_id in range(10, 16):
        bench.driver.submit(job_id, [KEYS[0]], [0], "a", is_promotion=False)
        assert not bench.result(job_id).success
    assert not bench.slot.available()
    assert bench.driver.lookup(KEYS[0], "a") is MISS
    before = bench.driver.metrics.dropped_cascades
    bench.driver.submit(20, KEYS[:3], [0, 1, 2], "a", is_promotion=False)
    assert not bench.result(20).success
    assert bench.driver.metrics.dropped_cascades == before + 3
    bench.store.broken = False
    bench.clock.now += 60
    bench.until(bench.slot.available)
    assert bench.store_rows([KEYS[0]], [0], job_id=21).success


def test_draining_waits_for_every_job_and_reports_it(bench):
    bench.store.gate.clear()
    bench.driver.submit(1, KEYS[:4], [0, 1, 2, 3], "a", is_promotion=False)
    drained = threading.Thread(target=bench.driver.drain)
    drained.start()
    drained.join(0.05)
    assert drained.is_alive()
    bench.store.gate.set()
    drained.join(PATIENCE)
    assert not drained.is_alive()
    assert [result.job_id for result in bench.driver.finished()] == [1]


def test_after_the_end_everything_is_a_miss_and_every_job_has_a_result():
    bench = Bench()
    bench.store_rows([KEYS[0]], [0])
    bench.driver.submit(2, [KEYS[0]], [1], "a", is_promotion=True)
    bench.driver.close(PATIENCE)
    bench.driver.close(PATIENCE)
    assert bench.closed == [PATIENCE]
    assert [result.job_id for result in bench.driver.finished()] == [2]
    bench.driver.submit(3, [KEYS[0]], [1], "a", is_promotion=True)
    assert [(result.job_id, result.success) for result in bench.driver.finished()] == [(3, False)]
    assert bench.driver.lookup(KEYS[0], "a") is MISS


def test_a_read_only_tier_takes_nothing_and_that_is_no_failure():
    bench = Bench(read_only=True)
    result = bench.store_rows([KEYS[0]], [0])
    assert result.success
    assert bench.store.values == {}
    assert bench.driver.metrics.failed_stores == 0
    bench.driver.close(PATIENCE)


def test_a_request_that_was_never_announced_is_answered(bench):
    bench.store_rows([KEYS[0]], [0])
    assert bench.lookup(KEYS[0], "another") is HIT
    bench.driver.request_finished("another")


@pytest.mark.parametrize("load_wait", [0.5])
def test_a_load_that_takes_too_long_releases_its_rows_and_is_reported_while_its_call_still_runs(bench):
    bench.store_rows(KEYS[:2], [3, 5])
    bench.driver.request_started("b", None)
    assert bench.lookup(KEYS[0]) is HIT
    bench.store.gate.clear()
    bench.store.reading.clear()
    bench.driver.submit(2, KEYS[:2], [7, 8], "a", is_promotion=True)
    bench.until(bench.store.reading.is_set)
    bench.clock.now += 0.4
    bench.step()
    assert bench.driver.has_jobs(), "it has not waited long enough yet"
    bench.clock.now += 0.2
    assert not bench.result(2).success
    assert not bench.driver.has_jobs()
    assert bench.driver.metrics.wait_expired == 2
    assert [bench.driver.lookup(key, "a") for key in KEYS[:2]] == [MISS, MISS], "for good"
    assert bench.driver.lookup(KEYS[0], "b") is MISS, "no other request waits for it, for a while"
    assert bench.driver.metrics.recomputed_cheaper == 1

    bench.memory[7 * ROW : 9 * ROW] = bytes([99]) * 2 * ROW  # the rows are another chunk's by now
    bench.store.gate.set()
    bench.until(lambda: not bench.tier.stats()["queued_loads"] and bench.tier.drain(PATIENCE))
    assert bench.memory[7 * ROW : 9 * ROW] == bytes([99]) * 2 * ROW
    assert bench.slot.available(), "slow is not broken"
    bench.clock.now += 2.0
    assert bench.lookup(KEYS[0], "b") is HIT


@pytest.mark.parametrize("load_wait", [0.5])
def test_after_each_preemption_a_request_whose_load_was_late_is_loaded_again(bench):
    bench.store_rows(KEYS[:2], [3, 5])
    for job_id in (2, 3):
        bench.store.gate.clear()
        bench.driver.submit(job_id, KEYS[:1], [7], "a", is_promotion=True)
        bench.clock.now += 0.6
        assert not bench.result(job_id).success
        assert [bench.driver.lookup(key, "a") for key in KEYS[:2]] == [MISS, MISS]
        bench.store.gate.set()
        bench.until(lambda: not bench.tier.stats()["queued_loads"] and bench.tier.drain(PATIENCE))
        bench.clock.now += 10.0  # the tier does not count as silent any more
        bench.driver.end_step(preempted=["a"])
        assert [bench.lookup(key) for key in KEYS[:2]] == [HIT, HIT]
    bench.driver.submit(4, KEYS[:2], [7, 8], "a", is_promotion=True)
    assert bench.result(4).success


def test_after_a_preemption_a_request_waits_for_answers_as_long_as_at_first(bench):
    bench.store.gate.clear()
    for key in KEYS[:2]:
        assert bench.driver.lookup(key, "a") is RETRY
        bench.driver.end_step()
        bench.clock.now += 0.019
        assert bench.driver.lookup(key, "a") is RETRY
        bench.clock.now += 0.002
        assert bench.driver.lookup(key, "a") is MISS
        bench.driver.end_step(preempted=["a"])
    assert bench.driver.lookup(KEYS[0], "a") is RETRY, "which it has not lost for good"


def test_a_preemption_ends_no_load_of_the_request_and_lets_none_in_that_was_left_out(bench):
    bench.store_rows(KEYS[:2], [3, 5])
    bench.driver.leave_out("b", bench)
    bench.driver.request_started("b", None)
    bench.store.gate.clear()
    bench.driver.submit(2, KEYS[:2], [7, 8], "a", is_promotion=True)
    bench.driver.end_step(preempted=["a", "b", "never announced"])
    bench.store.gate.set()
    assert bench.result(2).success
    assert (bench.driver.metrics.loading_chunks, bench.driver.metrics.loaded_chunks) == (0, 2)
    assert bench.lookup(KEYS[0]) is HIT
    assert bench.driver.lookup(KEYS[0], "b") is MISS


@pytest.mark.parametrize("load_wait", [0.5])
def test_a_request_waits_for_loads_while_it_has_some_and_no_longer_than_load_wait_in_all(bench):
    bench.store_rows(KEYS[:3], [3, 5, 6])
    bench.driver.submit(2, KEYS[:1], [7], "a", is_promotion=True)
    bench.clock.now += 0.2
    assert bench.result(2).success
    bench.clock.now += 100.0  # it is computed, put aside, and what it had is not in vLLM's memory any more
    bench.store.gate.clear()
    bench.driver.submit(3, KEYS[1:2], [8], "a", is_promotion=True)
    bench.driver.submit(4, KEYS[2:3], [9], "a", is_promotion=True)
    bench.clock.now += 0.25
    bench.step()
    assert bench.driver.metrics.wait_expired == 0, "while it was computed it waited for nothing"
    bench.clock.now += 0.1
    assert not bench.result(3).success
    assert not bench.result(4).success
    bench.store.gate.set()


@pytest.mark.parametrize("load_wait", [None])
@pytest.mark.parametrize("seconds_per_token", [None, 0.01], ids=["until computing has been measured", "as computing"])
def test_a_request_waits_for_loads_as_long_as_computing_takes_or_else_as_for_answers(bench, seconds_per_token):
    if seconds_per_token:
        computed(bench, "z", 640, 640 * seconds_per_token)
    bench.store_rows(KEYS[:2], [3, 5])  # 64 tokens
    bench.store.gate.clear()
    bench.driver.submit(2, KEYS[:1], [7], "a", is_promotion=True)
    bench.clock.now += (LATE * 32 * seconds_per_token if seconds_per_token else LOOKUP_WAIT) - 0.001
    bench.step()
    assert bench.driver.has_jobs()
    bench.clock.now += 0.002
    assert not bench.result(2).success


def test_steps_in_which_nothing_is_computed_leave_loads_some_time_and_others_do_not(bench):
    bench.store_rows(KEYS[:1], [3])
    driver, clock, rests = bench.driver, bench.clock, bench.rests
    driver.end_step()
    assert rests == [], "nothing is being loaded"
    bench.store.gate.clear()
    driver.submit(2, KEYS[:1], [7], "a", is_promotion=True)
    clock.now += 0.005
    bench.step()
    assert rests == [], "something was computed since the last step"
    clock.now += 0.0005
    driver.finished()
    clock.now += 0.01  # vLLM asks for each chunk
    driver.end_step()
    assert rests == [0.0001]
    bench.store.gate.set()
    bench.result(2)
    rests.clear()
    driver.end_step()
    assert rests == []


@pytest.fixture
def idle(bench):
    """An engine that has nothing else to do, and whose rests pass real time."""
    bench.idle_when = lambda: True
    bench.while_it_rests = lambda _seconds: time.sleep(0.002)
    return bench


def test_an_idle_engine_has_the_answer_in_the_call_that_asks(idle):
    assert idle.driver.lookup(KEYS[0], "a") is MISS
    assert idle.rests


def test_an_engine_with_others_to_compute_does_not_rest_for_an_answer(bench):
    assert bench.driver.lookup(KEYS[0], "a") is RETRY
    assert not bench.rests


def test_an_idle_engine_rests_no_longer_for_a_tier_that_is_slow(idle):
    idle.store.gate.clear()
    idle.while_it_rests = lambda seconds: setattr(idle.clock, "now", idle.clock.now + seconds)
    began = idle.clock.now
    for key in KEYS:
        assert idle.driver.lookup(key, "a") is RETRY
    assert idle.clock.now - began == pytest.approx(0.002, abs=0.0002), "all lookups of a step together"


@pytest.mark.parametrize(("begun_before", "answer"), [(False, MISS), (True, RETRY)])
def test_requests_that_come_together_are_begun_together(idle, begun_before, answer):
    running = ["another"] if begun_before else []
    idle.idle_when = lambda: not running
    idle.driver.finished()
    running.append("a request that the pass has just begun")
    assert idle.driver.lookup(KEYS[0], "a") is answer


def test_the_next_step_is_not_idle_because_the_last_one_was(idle):
    idle.driver.finished()
    idle.driver.end_step()
    idle.idle_when = lambda: False
    assert idle.driver.lookup(KEYS[0], "a") is RETRY


def test_what_was_announced_is_known_at_the_first_lookup(bench):
    bench.store_rows(KEYS[:2], [0, 1])
    bench.tier._lookups.clear()
    bench.driver.announce(KEYS)
    bench.until(lambda: not bench.tier.stats()["open_probes"])
    bench.driver.request_started("b", None)
    assert [bench.driver.lookup(key, "b") for key in KEYS[:3]] == [HIT, HIT, MISS]


def test_who_announces_does_not_wait_for_the_engine_nor_reach_into_its_calls(bench):
    bench.store.gate.clear()
    with bench.driver._tier._in_call:
        bench.driver.announce(KEYS)
    assert not bench.tier.stats()["open_probes"]
    bench.driver.announce(KEYS)
    assert bench.tier.stats()["open_probes"]
    bench.store.gate.set()


@pytest.mark.parametrize("is_started", [True, False], ids=["started", "asked about at once"])
def test_a_request_that_is_left_out_finds_nothing_and_stores_nothing_until_it_has_finished(bench, is_started):
    bench.store_rows([KEYS[0]], [0])
    values = dict(bench.store.values)
    arrived = Arrived("b")
    bench.driver.leave_out("b", arrived)
    if is_started:
        bench.driver.request_started("b", None)
        del arrived  # its last stores come when the engine has forgotten it
        gc.collect()
    assert bench.driver.left_out_requests == is_started
    assert bench.driver.lookup(KEYS[0], "b") is MISS
    assert bench.lookup(KEYS[0], "a") is HIT
    bench.driver.submit(2, [KEYS[1]], [1], "b", is_promotion=False)
    assert bench.result(2).success, "no failure is to be counted"
    assert bench.store.values == values
    bench.driver.request_finished("b")
    bench.driver.request_started("b", None)
    assert bench.lookup(KEYS[0], "b") is HIT
    assert bench.driver.left_out_requests == is_started


def test_nothing_is_kept_of_a_request_that_is_left_out_and_never_scheduled(bench):
    arrived = Arrived("b")
    bench.driver.leave_out("b", arrived)
    assert list(bench.driver._to_leave_out) == ["b"]
    del arrived
    gc.collect()
    assert not bench.driver._to_leave_out
    bench.store_rows([KEYS[0]], [0])
    bench.driver.request_started("b", None)
    assert bench.lookup(KEYS[0], "b") is HIT, "another that has its id"
    assert bench.driver.left_out_requests == 0


def test_unread_is_what_was_written_and_not_read_since_not_what_the_tier_had_already(bench):
    def move(job_id, count, *, is_promotion):
        bench.driver.submit(job_id, KEYS[:count], range(count), "a", is_promotion=is_promotion)
        assert bench.result(job_id).success
        return bench.driver.metrics.unread_bytes

    assert move(1, 4, is_promotion=False) == 4 * VALUE
    assert move(2, 4, is_promotion=False) == 4 * VALUE, "another replica had stored them, as far as the tier can see"
    assert move(3, 6, is_promotion=False) == 6 * VALUE
    assert move(4, 6, is_promotion=True) == 0
    assert move(5, 6, is_promotion=False) == 0


def test_an_engine_that_ends_waits_for_stores_for_its_drain_and_no_longer_and_says_what_was_dropped(caplog):
    """vLLM steps as long as a job is in flight, up to its --shutdown-timeout, and kills the engine then."""
    bench = Bench(threads=2)
    ending = []
    bench.driver = TierDriver(
        bench.slot,
        LOOKUP_WAIT,
        bench.close,
        [32],
        clock=bench.clock,
        sleep=bench.rests.append,
        is_ending=lambda: bool(ending),
        drain=10.0,
    )
    bench.until(bench.slot.available)
    bench.store.gate.clear()
    bench.driver.request_started("a", None)
    for number in range(4):  # of one the store is asked whether it has it, the others wait
        bench.driver.submit(number, KEYS[number : number + 1], [number], "a", is_promotion=False)
    bench.until(lambda: bench.tier.stats()["queued_stores"] == 3)
    ending.append(True)
    bench.step()
    bench.clock.now += 9.0
    bench.step()
    assert bench.results == [], "there is time for them yet"
    bench.clock.now += 2.0
    bench.until(lambda: len(bench.results) == 3)
    assert not any(result.success for result in bench.results)
    bench.driver.submit(9, KEYS[5:6], [5], "a", is_promotion=False)
    bench.step()
    assert [result.job_id for result in bench.results][-1] == 9, "what comes later is not begun"
    bench.store.gate.set()
    bench.until(lambda: not bench.driver.has_jobs())
    assert bench.tier.stats()["breaker_state"] == 0, "an engine that ends is no failure of the store's"
    bench.driver.close(PATIENCE)
    assert "test: shutdown within 60s dropped 4 jobs with 4 chunks" in caplog.text
    assert bench.store.values == {}, "the first one was asked whether it is there, and not written then"


@pytest.mark.parametrize("load_wait", [None])
def test_a_tier_that_seemed_too_slow_and_is_fast_again_is_found_so_by_its_trial(bench):
    computed(bench, "z", 640, 6.4)
    bench.store_rows(KEYS[:2], [3, 5])
    assert bench.lookup(KEYS[1]) is HIT
    bench.slot.rate.add(2, 2.0, bench.clock.now)
    bench.clock.now += 5.0
    shown = Arrived("b", 3200)
    bench.driver.expect(shown)
    bench.driver.request_started("b", None)
    bench.store.gate.clear()
    assert bench.lookup(KEYS[0], "b") is HIT, "a trial"
    bench.driver.submit(2, KEYS[:2], [7, 8], "b", is_promotion=True)
    for _ in range(3):
        bench.clock.now += 0.05
        bench.step()
    bench.store.gate.set()
    assert bench.result(2).success, "computing it takes 0.64 s"
    assert bench.slot.rate.seconds_per_chunk < 0.32


@pytest.mark.parametrize("load_wait", [None])
def test_the_first_chunks_of_a_prompt_are_not_given_up_while_it_waits_for_answers_about_the_others(bench):
    """A tier's latency is longer than computing few of them takes, and much shorter than computing all."""
    computed(bench, "z", 640, 6.4)
    bench.store_rows(KEYS[:6], range(6))
    bench.slot.rate.add(2, 1.02, bench.clock.now)
    bench.slot.rate.add(64, 1.64, bench.clock.now)
    assert bench.slot.rate.latency > 0.5
    shown = Arrived("b", 3200)
    bench.driver.expect(shown)
    bench.driver.request_started("b", None)
    assert bench.driver.lookup(KEYS[0], "b") is HIT
    bench.store.gate.clear()
    assert bench.driver.lookup(KEYS[7], "b") is RETRY, "what is there is known of one, and not of the other"
    bench.driver.submit(2, KEYS[:1], [7], "b", is_promotion=True)
    for job, some in ((3, slice(1, 2)), (4, slice(2, 6))):  # what is known comes by and by
        bench.driver.end_step()
        bench.clock.now += 0.008
        bench.results += bench.driver.finished()
        assert bench.driver.lookup(KEYS[7], "b") is RETRY
        bench.driver.submit(job, KEYS[some], range(16)[8:][some], "b", is_promotion=True)
    bench.store.gate.set()
    assert all(bench.result(job).success for job in (2, 3, 4))
