"""What a call asks the tiers for, in which order, and when it is over."""

import pytest

from kvtiers.client.prefetch import Prefetch
from kvtiers.client.requests import Delete, Get, Prefix, Present, Put, Task
from kvtiers.secondary.tier_jobs import JobFailed

FAR = 1e9


def test_values_go_to_every_tier_that_takes_stores_and_a_call_waits_for_all_of_them(bench, played, keys):
    one, two, read_only, gone = (played() for _ in range(4))
    gone.usable = False
    bench.drive(one, two, read_only, gone, read_only=[read_only])
    put = bench.begin(Put, keys)
    assert [len(tier.jobs) for tier in (one, two, read_only, gone)] == [1, 1, 0, 0]
    one.end(success=True)
    bench.step()
    assert not put.over.is_set()
    two.end(*keys[:1])
    bench.step()
    assert put.over.is_set()
    assert {name: list(good) for name, good in put.stored.items()} == {"t0": keys, "t1": keys[:1]}
    assert put.error == "t1 has not taken all values"


@pytest.mark.parametrize("why", ["unusable", "raises"])
def test_a_put_without_a_tier_is_over_at_once(bench, played, keys, why):
    tier = played()
    tier.usable, tier.raises = why != "unusable", why == "raises"
    bench.drive(tier)
    put = bench.begin(Put, keys)
    assert put.over.is_set()
    assert (put.stored, put.error) == ({}, "no tier is usable")
    put.lease.release()
    assert bench.free == 8


def test_tiers_are_asked_in_order_and_a_later_one_for_the_rest_alone(bench, played, keys):
    one, two = played(*keys[:2]), played(*keys)
    bench.drive(one, two)
    get = bench.begin(Get, keys)
    assert (next(iter(one.jobs.values())).keys, two.asked) == (keys[:2], [])
    one.end(keys[0])  # the other one was damaged
    bench.step()
    assert two.asked == keys[1:]
    assert not get.over.is_set()
    job = two.end(success=True)
    bench.step()
    assert get.over.is_set()
    assert set(get.found) == set(keys)
    assert list(job.chunk_ids) == list(get.lease.rows)[1:]


def test_what_a_tier_has_failed_to_give_is_loaded_from_the_next_one_into_other_rows(bench, played, keys):
    """Though the job has not ended: its host may still write into its rows."""
    one, two = played(*keys), played(*keys)
    bench.drive(one, two)
    get = bench.begin(Get, keys)
    one.says.append(JobFailed(next(iter(one.jobs)), "its host ended"))
    bench.step()
    job = next(iter(two.jobs.values()))
    assert job.keys == keys
    assert not {*job.chunk_ids} & {*get.lease.rows}
    two.end(success=True)
    bench.step()
    assert get.over.is_set()
    assert list(get.found.values()) == list(job.chunk_ids)
    get.release()
    assert bench.free == 4, "those of the job that has not ended are held"
    one.end()
    bench.step()
    assert bench.free == 8


@pytest.mark.parametrize("answers_first", [False, True], ids=["reaped first", "answered first"])
def test_rows_of_a_failed_job_that_has_ended_are_used_for_the_next_tier_where_there_are_no_others(
    bench, played, keys, answers_first
):
    one, two = played(*keys), played(*keys)
    two.answers = answers_first
    bench.drive(one, two)
    others = bench.rows.take(4, 0.0)
    get = bench.begin(Get, keys)
    one.says.append(JobFailed(next(iter(one.jobs)), "its host ended"))
    bench.step()
    assert two.jobs == {}, "its rows are in use, and there are no others"
    one.end()
    bench.step()
    two.answers = True
    bench.step()
    two.end(success=True)
    bench.step()
    assert get.over.is_set()
    assert set(get.found) == set(keys)
    get.release()
    others.release()
    assert bench.free == 8


def test_rows_of_a_failed_job_are_not_waited_for_if_the_values_of_the_next_tier_have_come_already(bench, played, keys):
    one, two, three = played(*keys[:2]), played(keys[0]), played(keys[0])
    three.answers = False
    bench.drive(one, two, three)
    get = bench.begin(Get, keys[:2], until=bench.clock.now + 30)
    one.says.append(JobFailed(next(iter(one.jobs)), "its host ended"))
    bench.step()
    bench.clock.now += 16
    bench.step()
    assert (len(two.jobs), get.over.is_set()) == (1, False), "it is late, and the third tier is asked"
    two.end(success=True)
    three.answers = True
    bench.step()
    bench.step()
    assert get.over.is_set()
    assert set(get.found) == {keys[0]}


def test_a_get_is_over_when_the_last_of_its_loads_has_failed_though_it_still_uses_its_rows(bench, played, keys):
    one, two = played(keys[0]), played(keys[1])
    bench.drive(one, two)
    get = bench.begin(Get, keys[:2])
    one.end(keys[0])
    bench.step()
    two.says.append(JobFailed(next(iter(two.jobs)), "its host ended"))
    bench.step()
    assert get.over.is_set()
    assert (set(get.found), get.error) == ({keys[0]}, "t1: its host ended")
    get.release()
    assert bench.free == 6
    two.end(success=True)
    bench.step()
    assert set(get.found) == {keys[0]}, "what comes later is not taken in"
    assert bench.free == 8


def test_a_value_that_no_tier_has_is_not_found_and_nothing_is_loaded(bench, played, keys):
    one, two = played(), played()
    bench.drive(one, two)
    get = bench.begin(Get, keys)
    assert get.over.is_set()
    assert get.found == {}
    assert (one.jobs, two.jobs) == ({}, {})


def test_a_tier_that_has_not_answered_yet_is_waited_for_and_one_that_stops_being_usable_is_not(bench, played, keys):
    one, two = played(), played(*keys)
    one.answers = False
    bench.drive(one, two)
    get = bench.begin(Get, keys)
    bench.step()
    assert two.asked == []
    one.usable = False
    bench.step()
    two.end(success=True)
    bench.step()
    assert set(get.found) == set(keys)


def test_a_prefix_goes_on_where_the_tier_before_ended_and_back_again(bench, played, keys):
    one, two = played(keys[0], keys[2]), played(keys[1])
    bench.drive(one, two)
    prefix = Prefix(keys, FAR)
    bench.driver.send(prefix)
    bench.step()
    assert prefix.over.is_set()
    assert prefix.length == 3


def test_a_prefix_waits_for_an_answer_and_has_what_it_found_when_its_time_is_over(bench, played, keys, clock):
    one, two = played(keys[0]), played()
    two.answers = False
    bench.drive(one, two)
    prefix = Prefix(keys, clock.now + 1)
    bench.driver.send(prefix)
    bench.step()
    assert not prefix.over.is_set()
    clock.now += 2
    bench.step()
    assert prefix.over.is_set()
    assert (prefix.length, prefix.error) == (1, "not ended in time")


def test_a_task_is_called_between_two_steps_and_one_that_raises_ends_itself_alone(bench, played, keys, caplog):
    bench.drive(played())
    done = []
    tasks = [Task(lambda: 1 / 0, FAR), Task(lambda: done.append(1), FAR)]
    for task in tasks:
        bench.driver.send(task)
    bench.step()
    assert done == [1]
    assert all(task.over.is_set() for task in tasks)
    assert "ZeroDivisionError" in caplog.text


def test_a_tier_that_does_not_answer_uses_up_its_share_of_the_time_and_no_more(bench, played, keys, clock):
    """Two tiers, ten seconds: the second one is asked after five, and what it has is found in time."""
    one, two = played(), played(*keys)
    one.answers = False
    bench.drive(one, two)
    get = bench.begin(Get, keys, clock.now + 10)
    clock.now += 4.9
    bench.step()
    assert two.asked == []
    clock.now += 0.2
    bench.step()
    two.end(success=True)
    bench.step()
    assert get.over.is_set()
    assert set(get.found) == set(keys)


@pytest.fixture
def late(bench, played, keys, clock):
    """Two tiers with the same values, and a get whose load from the first one takes longer than its share."""
    one, two = played(*keys), played(*keys)
    bench.drive(one, two)
    get = bench.begin(Get, keys, clock.now + 10)
    clock.now += 5.1
    bench.step()
    return one, two, get


def test_a_load_that_hangs_keeps_its_rows_and_the_next_tier_fills_others(bench, late, keys):
    one, two, get = late
    (hung,), (second,) = one.jobs.values(), two.jobs.values()
    assert set(hung.chunk_ids).isdisjoint(second.chunk_ids)
    two.end(success=True)
    bench.step()
    assert get.over.is_set()
    assert [get.found[key] for key in keys] == list(second.chunk_ids)
    get.release()
    assert bench.free == 4, "the job that hangs still has its rows"
    one.end(success=True)
    bench.step()
    assert bench.free == 8


def test_a_late_load_that_is_first_after_all_is_taken_and_the_other_tier_is_not_waited_for(bench, late, keys):
    one, two, get = late
    hung = one.end(*keys[:3])
    bench.step()
    assert not get.over.is_set()
    second = two.end(keys[3])
    bench.step()
    assert get.over.is_set()
    assert [get.found[key] for key in keys] == [*hung.chunk_ids[:3], second.chunk_ids[3]]
    get.release()
    assert bench.free == 8


def test_where_no_other_row_is_free_a_late_load_is_waited_for(bench, played, keys, clock):
    one, two = played(*keys), played(*keys)
    bench.drive(one, two)
    get = bench.begin(Get, keys, clock.now + 10)
    others = bench.rows.take(4, 0.0)
    clock.now += 5.1
    bench.step()
    assert two.jobs == {}
    one.end(success=True)
    bench.step()
    assert set(get.found) == set(keys)
    others.release()


def test_a_key_is_gone_when_every_tier_that_takes_stores_is_without_it(bench, played, keys):
    one, two, read_only, cannot = played(), played(), played(), played()
    for tier in (one, two, read_only):
        tier.can_delete = True
    bench.drive(one, two, read_only, read_only=[read_only])
    delete = bench.begin_on(Delete, keys, bench.rows.none())
    assert [len(tier.jobs) for tier in (one, two, read_only)] == [1, 1, 0]
    assert list(next(iter(one.jobs.values())).chunk_ids) == []
    one.end(success=True)
    bench.step()
    assert not delete.over.is_set()
    two.end(*keys[:1])
    bench.step()
    assert (delete.over.is_set(), delete.gone) == (True, {keys[0]})
    assert cannot.jobs == {}


@pytest.mark.parametrize("why", ["unusable", "raises", "cannot"])
def test_a_tier_that_removes_nothing_now_keeps_every_key_from_being_gone(bench, played, keys, why):
    one, two = played(), played()
    one.can_delete, two.can_delete = True, why != "cannot"
    two.usable, two.raises = why != "unusable", why == "raises"
    bench.drive(one, two)
    delete = bench.begin_on(Delete, keys, bench.rows.none())
    one.end(success=True)
    bench.step()
    said = "t1 moves rows by itself, and has no way to remove a value" if why == "cannot" else "t1 removes nothing now"
    assert (delete.over.is_set(), delete.gone, delete.error) == (True, set(), said)


@pytest.mark.parametrize("kind", [Get, Present, Prefetch])
def test_a_key_that_a_tier_raises_at_does_not_hide_those_behind_it(bench, played, keys, kind):
    near, far = played(), played(*keys)
    honest = far.lookup_many

    def raises_at_the_first(asked, context):
        if keys[0] in asked:
            raise ValueError("a key that it cannot name")
        return honest(asked, context)

    far.lookup_many = raises_at_the_first
    bench.drive(near, far)
    request = Present(keys, FAR) if kind is Present else kind(keys, bench.rows.take(len(keys), 0.0), FAR)
    bench.driver.send(request)
    bench.step()
    there = request.there if kind is Present else {key for job in far.jobs.values() for key in job.keys}
    assert there == set(keys[1:])
