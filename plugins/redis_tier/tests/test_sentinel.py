"""Sentinels: the master that they name is the one that is used, also after a failover."""

import pytest
from redis_servers import Sentinels, wait_until
from redis_traffic import under_load, works, write_all


def opened(tier, sentinels, **options):
    return tier.open(sentinels.url, topology="sentinel", master=sentinels.name, **options)


def test_a_master_that_they_do_not_have_is_said_so(tier, shared_sentinels):
    with pytest.raises(Exception, match="'other'"):
        tier.open(shared_sentinels.url, topology="sentinel", master="other")


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_a_failover_under_load_yields_no_wrong_byte_and_ends(tier, start, names, how):
    sentinels = start(Sentinels)
    store = opened(tier, sentinels, timeout="2s", connect_timeout="2s")
    many = names(32)
    with under_load(store, many):
        getattr(sentinels.master, how)()
        wait_until(lambda: sentinels.replica.has_role("master"), "the replica takes over")
        wait_until(lambda: works(store, many), "the tier works again")
    assert sentinels.replica.call("DBSIZE") >= len(many)


def test_a_master_that_was_demoted_and_lives_on_is_left(tier, start, names):
    sentinels = start(Sentinels)
    store = opened(tier, sentinels)
    many = names(4)
    assert all(write_all(store, many))
    sentinels.sentinels[0].call("SENTINEL FAILOVER", sentinels.name)
    wait_until(lambda: sentinels.master.has_role("slave"), "the master is a replica now")
    wait_until(lambda: works(store, many), "the tier writes to the new one")


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_a_sentinel_that_is_gone_or_hangs_is_passed_over(tier, start, names, how):
    sentinels = start(Sentinels)
    getattr(sentinels.sentinels[0], how)()
    store = opened(tier, sentinels, timeout="1h", connect_timeout="2s", deadline="1h")
    assert all(write_all(store, names(2)))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_it_is_the_master_s_address_that_decides_whether_values_leave_this_machine(
    tier, shared_sentinels, caplog, monkeypatch, elsewhere
):
    if elsewhere:  # for clients that connect; the Sentinels' addresses, in the url, are this machine's
        monkeypatch.setattr("kvtiers_redis.servers.is_loopback", lambda _: False)
    store = opened(tier, shared_sentinels)
    found = [finding.text for finding in store.diagnose(4096) if "clear text" in finding.text]
    assert ["other machines" in text for text in found] == [elsewhere]
    assert store._window == (4 << 20 if elsewhere else 512 << 10)
    assert ["clear text" in record.message for record in caplog.records] == [True] * elsewhere
