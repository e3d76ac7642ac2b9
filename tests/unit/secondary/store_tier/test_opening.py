"""A store's tier while its store opens, and when it has gone."""

from tests.unit.secondary.store_tier.hand_backend import HIT, RETRY, job, lookup, result_of, step

from kvtiers.api import TierConfig
from kvtiers.host.messages import Opened, Probed, Status
from kvtiers.secondary.host_client import BUMPED
from kvtiers.secondary.host_pool import HostPool, PooledHost
from kvtiers.secondary.store_tier import ChunkStoreTier


def test_a_tier_is_not_available_until_its_store_is_open(clock, backend):
    tier = ChunkStoreTier(TierConfig(type="t"), HostPool([PooledHost("t", backend)]), clock)
    assert not tier.is_available()
    backend.say(Opened())
    step(tier)
    assert tier.is_available()


def test_a_tier_that_has_opened_has_spoken_when_it_has_been_polled_and_one_that_cannot_be_opened_at_once(
    clock, backend
):
    tier = ChunkStoreTier(TierConfig(type="t"), HostPool([PooledHost("t", backend)]), clock)
    assert not tier.has_spoken()
    backend.state = ""
    assert tier.open_state() == ""
    assert not tier.has_spoken(), "it is not available before the next step"
    backend.state = "its host cannot be started: no processes"
    assert tier.has_spoken()
    backend.state = ""
    backend.say(Opened())
    step(tier)
    assert tier.has_spoken()
    assert tier.is_available()


def test_a_store_that_cannot_be_opened_is_one_warning_however_often_it_is_tried(clock, backend):
    tier = ChunkStoreTier(TierConfig(type="t"), HostPool([PooledHost("t", backend)]), clock)
    for _ in range(5):
        backend.say(Opened("ConnectionError: refused"))
        step(tier)
        clock.now += 10
    assert not tier.is_available()
    assert backend.probes == [], "what is not open is not probed"
    assert len(backend.logged) == 1
    assert backend.logged[0].startswith("t: out of use: ConnectionError: refused")


def test_a_bumped_namespace_is_not_said_to_be_tried_again(clock, backend):
    tier = ChunkStoreTier(TierConfig(type="t"), HostPool([PooledHost("t", backend)]), clock)
    backend.say(Opened(BUMPED))
    step(tier)
    assert backend.logged == [f"t: out of use: {BUMPED}; its lookups miss"]


def test_a_store_that_opens_late_is_probed_and_then_in_use(clock, backend, keys):
    tier = ChunkStoreTier(TierConfig(type="t"), HostPool([PooledHost("t", backend)]), clock)
    backend.say(Opened("ConnectionError: refused"))
    step(tier)
    backend.say(Opened())
    step(tier)
    (probe_id, _) = backend.probes.pop()
    assert not tier.is_available()
    backend.say(Probed(probe_id, b"\x00"))
    step(tier)
    assert tier.is_available()
    assert backend.logged[-1] == "t: answers again; back in use"


def test_a_host_that_ended_is_out_of_use_at_once_and_hits_resume_when_it_is_back(tier, backend, keys):
    tier.submit_store(job(1, keys))
    result_of(backend, 1, *[Status.DONE] * 6)
    step(tier)
    assert lookup(tier, keys) == [HIT] * 6
    backend.say(Opened("its host ended"))
    step(tier)
    assert not tier.is_available()
    backend.say(Opened())
    step(tier)
    backend.say(Probed(backend.probes[-1][0], b"\x00"))
    step(tier)
    assert tier.is_available()
    assert lookup(tier, keys) == [RETRY], "what was known may have gone with the host"
