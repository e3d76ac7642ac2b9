"""kvtiers' eviction policies as vLLM's: what leaves its primary, called as its manager calls its own policies."""

import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvtiers.primary.eviction import BUILT_IN
from kvtiers_policies.turn_hazard import TurnHazardPolicy
from kvtiers_vllm.own_tiering import tier_names
from kvtiers_vllm.plugin import register

from . import fake_vllm

MODULE = "own_tiering.cache_policy"


@dataclass
class Request:
    """vLLM's context of a request."""

    req_id: str
    kv_transfer_params: dict | None = None
    positions: dict = field(default_factory=dict)

    def get_offload_key_position(self, key):
        return self.positions[key]


def keys_of(path):
    """A chunk is named after its whole prefix, as a chained hash is."""
    return [b"/" + path[: end + 1].encode() for end in range(len(path))]


class Primary:
    """vLLM's CPUOffloadingManager, as far as it calls its policy (0.32, or 0.33 if ``says_who`` stores a chunk)."""

    def __init__(self, module, name, capacity, says_who=False):
        self.capacity = capacity
        self.says_who = says_who
        self.policy = getattr(module, name)(capacity)
        self.here = {}
        self.used = {}

    def begin(self, name, path, params=None):
        keys = keys_of(path)
        request = Request(name, params, {key: place for place, key in enumerate(keys)})
        self.used[name] = []
        return request, keys

    def note(self, request, keys):
        self.used[request.req_id] += [key for key in keys if key not in self.used[request.req_id]]

    def read(self, request, keys):
        for key in keys:
            if self.here[key].ref_cnt == 0:
                self.policy.mark_non_evictable(key)
            self.here[key].ref_cnt += 1
        self.note(request, keys)

    def read_ends(self, keys):
        for key in keys:
            self.here[key].ref_cnt -= 1
            if self.here[key].ref_cnt == 0:
                self.policy.mark_evictable(key)

    def store(self, request, keys):
        """Return the keys that are stored now; None: there is no room."""
        new = [key for key in keys if self.policy.get(key) is None]
        if new:
            self.policy.on_store_miss(new, request)
        self.note(request, keys)
        short = len(new) - (self.capacity - len(self.here))
        if short > 0:
            idle = [key for key, chunk in self.here.items() if chunk.ref_cnt == 0 and key not in keys]
            evicted = self.policy.evict(short, set(keys))
            assert (evicted is None) == (short > len(idle)), "all that is idle can leave, and nothing else"
            if evicted is None:
                return None
            assert len(evicted) == short
            for key, chunk in evicted:
                assert key in idle
                assert self.here.pop(key) is chunk
        for key in new:
            self.here[key] = SimpleNamespace(ref_cnt=-1)
            self.policy.insert(key, self.here[key], *[request] * self.says_who)
        return new

    def stored(self, keys, success=True):
        for key in keys:
            if success:
                self.here[key].ref_cnt = 0
                self.policy.mark_evictable(key)
            else:
                self.policy.remove(key)
                del self.here[key]

    def end(self, request):
        self.policy.on_request_finished((tuple(self.used.pop(request.req_id)),), set(), set(), request)

    def serve(self, name, path, params=None):
        """Serve a whole request; return its prefix hits."""
        request, keys = self.begin(name, path, params)
        hits = next((place for place, key in enumerate(keys) if self.policy.get(key) is None), len(keys))
        self.read(request, keys[:hits])
        self.read_ends(keys[:hits])
        if new := self.store(request, keys[hits:]):
            self.stored(new)
        self.end(request)
        return hits


@pytest.fixture
def module(monkeypatch):
    return fake_vllm.load(monkeypatch, MODULE, "0.32.0")


class AgainstManager(RuleBasedStateMachine):
    """Requests that overlap, over a tree of prefixes, with loads and stores that end later, or fail."""

    def __init__(self, primary):
        super().__init__()
        self.primary = primary
        self.running = {}
        self.reads, self.writes = [], []

    @rule(path=st.text("ab", min_size=1, max_size=5), number=st.integers(0, 2), ends=st.booleans())
    def request(self, path, number, ends):
        if number not in self.running:
            params = {"session": f"s{number}", "session_ends": ends}
            self.running[number] = self.primary.begin(f"r{number}", path, params)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def load(self, data):
        request, keys = self.running[data.draw(st.sampled_from(sorted(self.running)))]
        ready = [key for key in keys if key in self.primary.here and self.primary.here[key].ref_cnt >= 0]
        self.primary.read(request, ready)
        self.reads.append(ready)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), end=st.integers(1, 5), later=st.booleans())
    def store(self, data, end, later):
        request, keys = self.running[data.draw(st.sampled_from(sorted(self.running)))]
        if new := self.primary.store(request, keys[:end]):
            if later:
                self.writes.append(new)
            else:
                self.primary.stored(new)

    @precondition(lambda self: self.reads)
    @rule()
    def a_load_ends(self):
        self.primary.read_ends(self.reads.pop(0))

    @precondition(lambda self: self.writes)
    @rule(success=st.booleans())
    def a_store_ends(self, success):
        self.primary.stored(self.writes.pop(0), success)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data):
        self.primary.end(self.running.pop(data.draw(st.sampled_from(sorted(self.running))))[0])

    @rule(path=st.text("ab", min_size=1, max_size=9))
    def touch(self, path):
        self.primary.policy.touch(keys_of(path), Request("touch"))

    @rule()
    def reset(self):
        self.primary.policy.clear()
        self.primary.here.clear()
        self.running.clear()
        self.reads.clear()
        self.writes.clear()

    @invariant()
    def nothing_fails_and_every_chunk_is_found(self):
        assert self.primary.policy.bugs.count == 0
        assert all(self.primary.policy.get(key) is chunk for key, chunk in self.primary.here.items())
        assert len(self.primary.policy._chunks) == len(self.primary.here)


@pytest.mark.parametrize("says_who", [False, True])
@pytest.mark.parametrize("name", [*BUILT_IN, "turn-hazard"])
def test_what_is_idle_can_leave_and_nothing_else_whatever_happened(module, name, says_who):
    run_state_machine_as_test(
        lambda: AgainstManager(Primary(module, name, 6, says_who)),
        settings=settings(max_examples=30, stateful_step_count=40, deadline=None),
    )


def sessions_and_scans(module, name):
    """Return the share of hits of sessions that come back after minutes, among prompts that never do."""
    primary, now = Primary(module, name, 1000), [0.0]
    primary.policy._policy.clock = lambda: now[0]
    hits = requests = 0
    for turn in range(30):
        for number in range(60):
            now[0] += 5.0
            requests += 1
            if number % 3:
                found = primary.serve(f"r{requests}", chr(0x4E00 + number) * 10)
                hits += found if turn >= 15 else 0
            else:
                primary.serve(f"r{requests}", chr(0x5E00 + requests) * 40)
    assert primary.policy.bugs.count == 0
    return hits / (15 * 40 * 10)


@pytest.mark.slow
def test_what_comes_back_outlives_what_never_does_once_that_is_learnt(module):
    assert sessions_and_scans(module, "lru") < 0.1
    assert sessions_and_scans(module, "turn-hazard") > 0.9


def test_a_prompt_stored_in_steps_and_read_back_is_one_run_of_its_requests_own_uses(module):
    primary = Primary(module, "turn-hazard", 100)
    request, keys = primary.begin("first", "abcdef")
    for start in (0, 2, 4):
        primary.stored(primary.store(request, keys[start : start + 2]))
    assert primary.policy._policy.known == 0, "vLLM has not said yet what the request has used"
    primary.end(request)
    assert primary.serve("second", "abcdefgh") == 6
    (run,) = set(primary.policy._policy._tree.run_of.values())
    assert (len(run.keys), run.uses) == (8, 2)


@pytest.mark.parametrize("name", [*BUILT_IN, "turn-hazard"])
def test_what_a_running_request_has_stored_leaves_where_nothing_else_can(module, name):
    primary = Primary(module, name, 4)
    first, keys = primary.begin("first", "abcd")
    primary.stored(primary.store(first, keys))
    second, others = primary.begin("second", "xy")
    assert primary.store(second, others) == others
    assert list(primary.here) == [*keys[:2], *others]
    primary.stored(others)
    primary.end(first)
    primary.end(second)
    assert primary.policy.bugs.count == 0


@pytest.mark.parametrize("says_who", [False, True])
def test_chunks_of_running_requests_become_known_as_their_own_and_are_used_once(module, says_who):
    primary = Primary(module, "turn-hazard", 12, says_who)
    first, second = (primary.begin(name, name * 6) for name in "ab")
    for start in (0, 3):
        for request, keys in (first, second):
            primary.stored(primary.store(request, keys[start : start + 3]))
    third, others = primary.begin("c", "cc")
    primary.stored(primary.store(third, others))
    tree = primary.policy._policy._tree
    assert set(tree.run_of) == set(first[1]), "one request's are enough"
    fourth, more = primary.begin("d", "ddddd")
    primary.stored(primary.store(fourth, more))
    for request in (first[0], second[0], third, fourth):
        primary.end(request)
    runs = set(tree.run_of.values())
    assert all(len({key[:2] for key in run.keys}) == 1 for run in runs)
    assert {run.uses for run in runs} == {1}
    assert not primary.policy._policy._ways
    assert not primary.policy._missed
    assert primary.policy.bugs.count == 0


def test_a_session_that_ends_is_heeded_for_chunks_that_became_known_before_their_requests_end(module):
    primary = Primary(module, "turn-hazard", 10)
    request, keys = primary.begin("a", "aaaaaaaaaa", {"session": "a", "session_ends": True})
    primary.stored(primary.store(request, keys))
    other, _ = primary.begin("b", "bb", {"session": "b"})
    primary.stored(primary.store(other, keys_of("bb")))
    primary.end(request)
    assert all(run.ended for key, run in primary.policy._policy._tree.run_of.items() if key in keys)


@pytest.mark.parametrize("ends", [True, False])
def test_what_only_a_session_that_ends_has_used_leaves_first(module, ends):
    primary = Primary(module, "turn-hazard", 10)
    for name in "acb":
        primary.serve(name, "s" + name * 3, {"session": name, "session_ends": ends and name == "b"})
    primary.serve("d", "sdd")
    assert [key for key in keys_of("sbbb") if key not in primary.here] == (keys_of("sbbb")[-2:] if ends else [])


def test_an_error_of_a_policy_refuses_a_store_and_does_not_reach_vllm(module, monkeypatch, caplog):
    primary = Primary(module, "turn-hazard", 4)
    primary.serve("a", "abcd")

    def broken(*_args):
        raise RuntimeError("broken")

    monkeypatch.setattr(TurnHazardPolicy, "evict", broken)
    monkeypatch.setattr(TurnHazardPolicy, "access", broken)
    assert primary.policy.evict(1, set()) is None
    assert primary.policy.touch(keys_of("a"), Request("r")) is None
    assert "kvtiers-turn-hazard: evict failed (1 times so far); a bug of kvtiers" in caplog.text


def fails_once(monkeypatch, method, answer):
    """Let a policy's method do this in its first call; return whether it was called, as a list that is not empty."""
    real, calls = getattr(TurnHazardPolicy, method), []

    def once(self, *args):
        calls.append(args)
        return answer(self, *args) if len(calls) == 1 else real(self, *args)

    monkeypatch.setattr(TurnHazardPolicy, method, once)
    return calls


WRONG = {
    "a chunk that is read": lambda read, idle: [read[0], idle[1]],
    "a chunk twice": lambda _read, idle: [idle[1], idle[1]],
    "too few": lambda _read, idle: idle[1:2],
    "too many": lambda _read, idle: idle[1:4],
    "a protected chunk": lambda _read, idle: idle[:2],
    "an unknown chunk": lambda _read, idle: [idle[1], b"unknown"],
}


@pytest.mark.parametrize("answer", WRONG)
def test_an_answer_that_a_policy_must_not_give_takes_no_chunk_and_stores_go_on(module, monkeypatch, answer):
    primary = Primary(module, "turn-hazard", 8)
    primary.serve("a", "abcd")
    primary.serve("b", "wxyz")
    reader, read = primary.begin("reader", "abcd")
    primary.read(reader, read)
    idle = keys_of("wxyz")
    calls = fails_once(monkeypatch, "evict", lambda _self, _count: WRONG[answer](read, idle))
    assert primary.policy.evict(2, {idle[0]}) is None
    assert len(calls) == 1
    assert primary.policy.bugs.count == 1
    assert all(primary.policy.get(key) is chunk for key, chunk in primary.here.items())
    other, others = primary.begin("c", "123")
    assert primary.store(other, others) == others
    primary.stored(others)
    primary.read_ends(read)
    assert primary.serve("d", "56789") == 0
    assert primary.policy.bugs.count == 1


def half_done(policy, *args):
    """Drop half of what the policy holds, and fail."""
    for key in list(policy._tree.run_of)[::2]:
        del policy._tree.run_of[key]
    raise RuntimeError("broken")


@pytest.mark.parametrize("method", ["evict", "mark_evictable", "mark_pinned", "request_finished"])
def test_stores_go_on_after_an_error_that_has_half_changed_the_policy(module, monkeypatch, method):
    primary = Primary(module, "turn-hazard", 8)
    primary.serve("a", "abcd")
    primary.serve("b", "wxyz")
    calls = fails_once(monkeypatch, method, half_done)
    if method == "evict":
        assert primary.policy.evict(2, set(keys_of("ab"))) is None
    for number in range(6):
        primary.serve(f"r{number}", "abcd" + str(number) * 2)
        primary.serve(f"q{number}", str(number) * 3)
    assert calls
    assert primary.policy.bugs.count == 1
    assert len(primary.here) == 8
    runs = set(primary.policy._policy._tree.run_of.values())
    assert all(key.startswith(run.keys[0]) for run in runs for key in run.keys), "no run of several prompts' chunks"


def test_stores_go_on_after_an_error_where_no_new_policy_can_be_made(module, monkeypatch):
    primary = Primary(module, "turn-hazard", 4)
    primary.serve("a", "abcd")

    def broken(*_args):
        raise RuntimeError("broken")

    monkeypatch.setattr(TurnHazardPolicy, "__init__", broken)
    fails_once(monkeypatch, "evict", broken)
    assert primary.policy.evict(1, set(keys_of("abc"))) is None
    assert primary.serve("b", "wxyz") == 0
    assert primary.policy.bugs.count == 1


def test_a_policy_that_fails_at_each_call_is_made_again_three_times_and_is_lru_then(module, monkeypatch, caplog):
    made, make = [], TurnHazardPolicy.__init__

    def makes(*args):
        made.append(args)
        make(*args)

    def broken(*_args):
        raise RuntimeError("broken")

    monkeypatch.setattr(TurnHazardPolicy, "__init__", makes)
    monkeypatch.setattr(TurnHazardPolicy, "access", broken)
    primary = Primary(module, "turn-hazard", 8)
    for number in range(10):
        primary.serve(f"r{number}", "abcd")
    assert len(made) == 1 + 3
    assert primary.policy.bugs.count == 4
    (line,) = [line for line in caplog.messages if "LRU" in line]
    assert line.startswith("kvtiers-turn-hazard: it has failed 4 times in an hour; chunks leave by LRU")
    primary.serve("other", "wxyz")
    primary.serve("again", "abcd")
    assert primary.serve("third", "1234") == 0
    assert set(primary.here) == {*keys_of("abcd"), *keys_of("1234")}, "the least recently used ones have left"
    assert primary.policy.bugs.count == 4


def test_a_policy_that_fails_three_times_an_hour_stays_and_the_fourth_error_in_an_hour_brings_lru(
    module, monkeypatch, caplog
):
    now, primary = 0.0, Primary(module, "turn-hazard", 8)
    primary.policy.clock = lambda: now
    for number in range(6):
        now = number * 1200.0
        with monkeypatch.context() as broken:
            fails_once(broken, "access", half_done)
            primary.serve(f"r{number}", "abcd")
        assert primary.policy.bugs.count == number + 1
        assert "chunks leave by LRU" not in caplog.text
    now = 7199.0  # the errors at 3600, 4800 and 6000 are less than an hour ago
    with monkeypatch.context() as broken:
        fails_once(broken, "access", half_done)
        primary.serve("another", "abcd")
    assert "chunks leave by LRU" in caplog.text


def test_every_policy_that_vllm_lacks_is_registered_by_a_name_that_vllm_config_writes(monkeypatch, module):
    fake_vllm.install(monkeypatch)
    monkeypatch.setattr("kvtiers_vllm.plugin.installed_names", lambda _group: ["theirs", "turn-hazard"])
    register()
    names = {
        tier_names.policy_name(name): ("kvtiers_vllm.own_tiering.cache_policy", name)
        for name in ("theirs", "turn-hazard")
    }
    assert fake_vllm.CachePolicyFactory.registered == names
    assert [tier_names.policy_name(name) for name in ("lru", "arc")] == ["lru", "arc"]
    with pytest.raises(AttributeError):
        _ = module.__path__


def test_where_vllm_says_nothing_of_a_requests_end_no_policy_is_registered(monkeypatch):
    """Up to 0.30: vLLM itself then refuses the name at the start, with those that it has."""
    fake_vllm.install(monkeypatch, "0.30.0")
    monkeypatch.setattr(sys.modules["vllm.v1.kv_offload.cpu.policies.base"], "CachePolicy", fake_vllm.OldCachePolicy)
    register()
    assert fake_vllm.CachePolicyFactory.registered == {}
