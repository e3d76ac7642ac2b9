"""What a host is sent, and what becomes of it when it does not read."""

import pytest
from tests.unit.secondary.host_connection.scripted_host import load

from kvtiers.host.messages import Names, Opened, Status

DONE, FAILED = Status.DONE, Status.FAILED


def test_a_host_hears_hello_then_its_names_then_jobs_and_questions_in_order(ends, kit, keys):
    tier = ends.tier
    assert tier.send_job(load(1, keys))
    other = type(kit.NAMES)("test/other-0123456789abcdef01234567/", b"layout-2")
    tier.set_names(other)
    assert tier.send_probe(5, keys[:2], is_prefix=True)
    tier.abandon(1)
    tier.flush()
    heard = ends.hosts[0].heard()
    sent = ["Hello", "Names", "StoreJob", "Names", "Probe", "Abandon"]
    assert [type(message).__name__ for message in heard] == sent
    assert heard[3] == Names(other.prefix, other.layout_id)


def test_a_host_that_does_not_read_fills_the_outbox_and_then_nothing_is_taken(ends, keys):
    tier = ends.tier
    many = keys * 2000
    taken = 0
    while tier.send_probe(taken, many[:1000], is_prefix=False):
        tier.flush()
        taken += 1
    assert 50 < taken < 1000
    assert not tier.send_job(load(1, many[:1000]))
    assert tier.send_job(load(2, keys[:1])), "what is small may still fit"
    ends.hosts[0].heard()
    tier.flush()
    assert tier.send_probe(taken, many[:1000], is_prefix=False)


def test_a_host_that_cannot_be_sent_new_names_is_killed(ends, kit, log_lines):
    ends.tier.set_names(type(kit.NAMES)("x" * (4 << 20) + "/", b"layout-2"))
    assert log_lines("its host is killed: it cannot be sent the names of the new weights")


def test_after_a_death_the_next_life_gets_the_names_of_now(ends, kit, keys):
    ends.processes[0].kill()
    ends.poll(until=Opened)
    other = type(kit.NAMES)("test/other-0123456789abcdef01234567/", b"layout-2")
    ends.tier.set_names(other)
    kit.wait_until(lambda: ends.tier.poll() or ends.link.connected, "the next life")
    ends.link.flush()
    names = [message.prefix for message in ends.hosts[1].heard() if isinstance(message, Names)]
    assert names == [other.prefix]


@pytest.mark.parametrize("remembered", ["parts", "_probes"])
def test_what_is_sent_is_remembered_before_another_thread_can_poll(ends, keys, remembered):
    """``open_state`` polls on any thread: an answer that it takes must find the question."""
    tier = ends.tier

    class Guarded(dict):
        def __setitem__(self, number, sent):
            assert ends.link.lock._is_owned()
            super().__setitem__(number, sent)

    setattr(tier, remembered, Guarded())
    assert tier.send_job(load(1, keys))
    assert tier.send_probe(2, keys, is_prefix=True)
    assert len(getattr(tier, remembered)) == 1
