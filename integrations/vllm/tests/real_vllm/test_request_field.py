"""The request field in the real vLLM: what ``kv_transfer_params`` and a salt's owner change in tiers and primary."""

import pytest

from .engines import BLOCK
from .models import make_prompt
from .ways import fs, whole_stack

CHUNKS = 20
"""Chunks of each prompt."""
WHOLE = CHUNKS * BLOCK
"""Tokens of each prompt in whole blocks."""
CONFIG = {"primary": {"capacity": "7MiB", "eviction": "turn-hazard"}, "tenants": {"salt_separator": ":"}}
"""Its primary has rows for five prompts, and a few more."""
LOADED = "kvtiers_tier_loaded_chunks{fs}"
PREFETCHED = "kvtiers_prefetched_chunks"
KEPT = "kvtiers_primary_kept_rows"
OVER_SHARE = "kvtiers_primary_kept_over_share"


class Client:
    """Asks one engine; between two calls only the primary and the tier hold anything."""

    def __init__(self, engine):
        self.engine = engine
        self._prompts = 0

    def new_prompt(self):
        self._prompts += 1
        return make_prompt(1000 + self._prompts, WHOLE + 1)

    def cached(self, *prompts, params=None, **more):
        """Return how many tokens of each prompt are found. ``params``: the kv_transfer_params of each."""
        assert self.engine.do("reset_prefix_cache")["ok"]
        return self.engine.generate(*prompts, params=params, **{"tokens": 2} | more)[1]

    def store(self, *every_params):
        """Return new prompts that were sent one after the other with these parameters, and are in the tier."""
        prompts = []
        for params in every_params:
            prompts.append(self.new_prompt())
            assert self.cached(prompts[-1], params=[params]) == [0]
            self.engine.settle()  # a row that is being written to the tier cannot be evicted
        return prompts

    def figure(self, name):
        return self.engine.metrics().get(name, 0)

    def left(self, prompt):
        """Return how many chunks of a stored prompt had left the primary, so that the tier has to bring them."""
        before = self.figure(LOADED)
        assert self.cached(prompt) == [WHOLE]
        return self.figure(LOADED) - before


@pytest.fixture(scope="module")
def used_client(start_any, model, tmp_path_factory):
    store = fs(tmp_path_factory.mktemp("store"))
    engine = start_any(model, whole_stack(store, options=CONFIG), max_num_seqs=1)
    yield Client(engine)
    assert not engine.lines("a bug of kvtiers")
    engine.shutdown()


@pytest.fixture
def client(used_client):
    used_client.engine.forget()
    return used_client


def of(**field):
    """Return the kv_transfer_params with this field."""
    return {"kvtiers": field}


BLUE, RED, GREEN = (of(tenant=name) for name in ("blue", "red", "green"))


def test_a_tenant_finds_its_own_values_and_no_others(client):
    prompt = client.new_prompt()
    for params in (BLUE, RED, None):
        assert client.cached(prompt, params=[params]) == [0], "nothing of another tenant in the primary"
        client.engine.settle()  # a primary as small as this has not enough rows to write two prompts at once
    client.engine.forget()
    assert client.cached(prompt, params=[BLUE]) == [WHOLE], "from the tier"
    assert client.cached(prompt, params=[{"kvtiers_tenant": "red"}]) == [WHOLE], "the name beside the field"
    assert client.cached(prompt, params=[GREEN]) == [0], "nothing of another tenant in the tier"
    assert client.cached(prompt, params=[GREEN]) == [WHOLE]


def test_a_request_whose_tenant_has_no_valid_name_uses_no_tier(client):
    prompt = client.new_prompt()
    before = client.figure("kvtiers_refused_tenants")
    for _ in range(2):
        assert client.cached(prompt, params=[of(tenant="not a name")]) == [0]
    assert client.figure("kvtiers_refused_tenants") == before + 2
    assert client.engine.lines("a request runs without tiers")


def test_the_owner_of_a_salt_is_the_tenant(client):
    prompt = client.new_prompt()
    assert client.cached(prompt, salt="blue:1") == [0]
    assert client.cached(prompt, salt="blue:1", params=[BLUE]) == [WHOLE], "the tenant that it names is the owner"
    for _ in range(2):
        assert client.cached(prompt, salt="blue:1", params=[RED]) == [0], "a salt of another tenant: no tier"
    assert client.cached(prompt, salt="blue:2") == [0]
    assert client.cached(prompt, salt="blue:1") == [WHOLE]


@pytest.mark.parametrize(
    "params", [{"session": "ends", "session_ends": True}, of(priority="low")], ids=["session_ends", "priority-low"]
)
def test_a_session_that_ends_and_a_request_of_low_priority_leave_before_all_others(client, params):
    first, older, third, *newer = client.store(params, None, params, *[None] * 4)
    rows = client.figure("kvtiers_primary_rows")
    assert 5 * CHUNKS <= rows < 6 * CHUNKS, "more than a prompt has to leave, and no more than two"
    assert [client.left(prompt) for prompt in (older, *newer)] == [0] * 5
    assert client.left(first) + client.left(third) >= 7 * CHUNKS - rows


def test_ttl_and_high_priority_keep_rows_and_the_high_ones_last(client):
    half = client.figure("kvtiers_primary_rows") // 2
    dropped = client.figure(OVER_SHARE)
    high, normal, last = client.store(of(priority="high"), of(ttl="1h"), of(ttl=600))
    assert client.figure(KEPT) == half
    assert client.figure(OVER_SHARE) - dropped == 3 * CHUNKS - half > 0, "the oldest of normal priority"
    plain, *_ = client.store(*[None] * 8)
    assert client.left(high) == client.left(last) == 0
    assert client.left(normal) == 3 * CHUNKS - half
    assert client.left(plain) > 0


def test_prefetch_loads_a_prompt_while_its_request_waits_for_its_turn(client):
    (prompt,) = client.store(None)
    # The one before it is shorter than a chunk: no tier is asked about it, so it begins at once.
    for params in (None, of(prefetch=True)):
        client.engine.forget()
        before = client.figure(PREFETCHED)
        assert client.cached([1, 2, 3], prompt, params=[None, params], tokens=60) == [0, WHOLE]
        assert (client.figure(PREFETCHED) > before) is (params is not None)
