"""Several engines in a pool: one copy of a chunk, which all of them load, and none writes to while another reads it."""

import math
import threading
from functools import partial

import pytest
from tests.pool_rig import LAYOUT, PREFIX, KeeperThread, PoolEngine, chain, wait_until

from kvtiers.api import StartError
from kvtiers.pool import barrier
from kvtiers.pool import neighbours as neighbours_module
from kvtiers.pool.loan import PoolLoan, pool_figures
from kvtiers.pool.memory import Plane, Shape, residents

ROWS = 200
SIZE = ROWS * LAYOUT.row_stride
KEYS = chain(1, 30)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "pool.sock"


@pytest.fixture
def keeper(path):
    return KeeperThread(path, SIZE, parts=2)


@pytest.fixture
def start(path, keeper):
    """Start engines."""
    return partial(PoolEngine, path)


def sees(engine, keys):
    """Wait until an engine knows of these chunks of others, and they are checked."""
    wait_until(lambda: not engine.tier.lacks_all(keys[-1:]), "it is not followed")
    engine.await_checks(keys)


def stored(engine, keys):
    engine.store(keys)
    wait_until(engine.is_published, "it is not published")


def pins(engine):
    return int(engine.loan._plane._pins.sum())


def test_one_engine_loads_what_another_one_stored_and_stores_no_second_copy(start):
    one, other = start(), start()
    assert (one.tier.num_rows, other.tier.num_rows) == (100, 100)
    stored(one, KEYS)
    sees(other, KEYS)
    assert other.load(KEYS) == 30
    assert other.store(KEYS) == []
    assert other.tier.free_rows == 100
    assert one.tier.evictable == 30
    stored(other, chain(2, 20))
    sees(one, chain(2, 20))
    assert one.load(chain(2, 20)) == 20


def test_what_nobody_reads_any_more_is_given_back(start):
    one, other = start(), start()
    stored(one, KEYS)
    sees(other, KEYS)
    assert pins(one) == 30
    assert other.load(KEYS[:20]) == 20
    assert pins(one) == 10, "those that were looked up and not read"
    other.tier.release_expired(math.inf)
    assert (pins(one), other.tier.chunks, other.tier.pinned_rows) == (0, 0, 0)


def test_an_engine_borrows_half_as_many_rows_as_it_has_at_a_time(start):
    one, other, keys = start(), start(), chain(1, 80)
    stored(one, keys)
    wait_until(lambda: keys[-1] in other.loan._neighbours.places, "it is not followed")
    other.await_checks(keys[:50])
    assert other.tier.ready_run(keys) == 50
    assert pins(one) == 50
    assert other.load(keys) == 50
    other.await_checks(keys[50:])
    assert other.load(keys[50:]) == 30


def test_a_row_that_another_engine_reads_is_not_written_to(start):
    one, other = start(), start()
    stored(one, chain(1, 100))
    tail = chain(1, 100)[90:]  # which leaves first
    sees(other, tail)
    rows = other.tier.prepare_load(tail, "reads")
    assert len(one.store(chain(2, 15))) == 5, "those that nobody reads"
    assert one.tier.quarantined_rows == 10
    assert len(one.store(chain(3, 5))) == 5
    other.compare(tail, rows)
    other.tier.complete_load(rows)
    one.tier.release_expired(0)
    assert one.tier.quarantined_rows == 0
    stored(one, chain(4, 100))
    assert one.load(chain(4, 100)) == 100


def test_a_chunk_that_left_before_it_was_pinned_is_a_miss(start):
    one, other = start(), start()
    stored(one, KEYS)
    wait_until(lambda: KEYS[-1] in other.loan._neighbours.places, "it is not followed")
    one.loan.renew(one.rows_of(KEYS))
    assert other.load(KEYS) == 0
    assert pins(one) == 0


def test_a_use_by_another_engine_is_a_use(start):
    one, other = start(), start()
    stored(one, chain(1, 50))
    stored(one, chain(2, 50))
    sees(other, chain(1, 50))
    assert other.load(chain(1, 50)) == 50
    one.tier.release_expired(0)
    assert one.tier.coldest(50) == chain(2, 50)[::-1]


def test_uses_by_others_at_the_same_time_raise_nothing_into_the_owners_step(over):
    plane = Plane.create(Shape(2 * 500_000 * 4096, 4096, 2))

    def use():
        while not over.is_set():
            plane._touched[:] ^= 1

    others = threading.Thread(target=use)
    others.start()
    for _ in range(2000):
        plane.take_touched()
    over.set()
    others.join()
    plane.close()


def test_a_chunk_of_another_engine_that_has_changed_since_it_was_hashed_is_a_miss(start, caplog):
    one, other = start(), start()
    stored(one, KEYS)
    one.row(*one.rows_of(KEYS[20:21]))[7] ^= 1
    sees(other, KEYS[:20])
    assert other.load(KEYS) == 20
    assert "in row 20, is damaged, and is not used" in caplog.text
    assert other.store(KEYS[20:]), "it has its own copy then"
    other.tier.release_expired(math.inf)
    assert pins(one) == 0


def test_each_chunk_is_checked_once(start, monkeypatch):
    one, other = start(), start()
    stored(one, KEYS)
    sees(other, KEYS)
    assert other.load(KEYS) == 30
    monkeypatch.setattr(other.loan._neighbours, "_check", None)
    for _ in range(3):
        assert other.load(KEYS) == 30


@pytest.mark.parametrize("prefix", [PREFIX.replace("default", "other"), PREFIX[:-2] + "0/"])
def test_engines_with_chunks_of_other_names_share_nothing(start, prefix):
    one, other = start(), start(prefix=prefix)
    stored(one, KEYS)
    stored(other, chain(2, 5))
    other.loan._neighbours.follow()
    assert not other.loan._neighbours.places
    assert other.load(KEYS) == 0


def test_after_new_weights_an_engine_shares_with_those_that_have_them_too(start):
    one, other = start(), start()
    stored(one, KEYS)
    sees(other, KEYS)
    held = other.tier.prepare_load(KEYS[:5], "reads")
    renamed = PREFIX.replace("default", "new")
    for engine in (one, other):
        engine.tier.reset_cache()
        engine.loan.rename(renamed)
        assert engine.load(KEYS) == 0
    other.tier.complete_load(held)
    assert pins(one) == 0
    stored(one, chain(2, 10))
    sees(other, chain(2, 10))
    assert other.load(chain(2, 10)) == 10
    assert other.load(KEYS) == 0


def test_without_a_memory_barrier_an_engine_is_lent_no_part_of_several(path, start, monkeypatch):
    monkeypatch.setattr(barrier, "_NUMBERS", {})
    with pytest.raises(StartError, match=r"no membarrier\(2\) to share a pool with"):
        PoolLoan.take(str(path), PREFIX, LAYOUT, 60)
    monkeypatch.undo()
    assert start().check() == 0, "the part was given back"


def test_a_third_engine_waits_and_gets_the_part_that_is_given_back(path, keeper, start):
    one, _ = PoolEngine(path), start()
    stored(one, KEYS)
    with pytest.raises(StartError, match="have its memory, for longer than this start can wait"):
        PoolEngine(path, in_use_seconds=0.2)
    one.close()
    third = start()
    assert third.check() == 30
    assert keeper.figures()["engines"] == 3


def test_the_next_engine_gets_the_part_with_most_of_its_chunks(path, keeper, start):
    one, other = PoolEngine(path), PoolEngine(path)
    stored(one, chain(1, 10))
    stored(other, chain(2, 20))
    one.close()
    other.close()
    wait_until(lambda: not any(part["lent"] or part["checking"] for part in keeper.figures()["parts"]), "not returned")
    third = start()
    assert third.check() == 20
    sees(third, chain(1, 10))
    assert third.load(chain(1, 10)) == 10, "what an engine left is everybody's"


def test_events_name_what_other_engines_have_too(start):
    one, other = start(), start()
    stored(one, KEYS)
    sees(other, KEYS)
    (event,) = other.tier.take_events()
    assert (event.keys, event.removed) == (KEYS, False)
    one.tier.take_events()
    other.tier.release_expired(math.inf)
    stored(one, chain(2, 100))
    wait_until(lambda: other.tier.poll() or len(other.tier.events) > 1, "it is not followed")
    gone = {key for event in other.tier.take_events() if event.removed for key in event.keys}
    assert gone <= set(KEYS)
    assert gone


def test_the_next_keeper_gets_all_parts_back_from_their_engines(path):
    keeper = KeeperThread(path, SIZE, parts=2)
    one, other = PoolEngine(path), PoolEngine(path)
    stored(one, KEYS)
    stored(other, chain(2, 20))
    keeper.stop()
    one.store(chain(3, 5))
    keeper = KeeperThread(path, SIZE, handover=60, parts=1)
    wait_until(lambda: [part["engine_connected"] for part in keeper.figures()["parts"]] == [True, True], "not brought")
    wait_until(one.is_published, "it is not published")
    sees(other, chain(3, 5))
    assert other.load(chain(3, 5)) == 5
    one.close()
    third = PoolEngine(path)
    assert third.check() == 35


def test_a_chunk_that_is_reset_while_it_is_loaded_is_not_borrowed_again_before_that_load_has_ended(start):
    """Its row would be taken for one of the borrower's own, and written to."""
    one, other = start(), start()
    stored(one, KEYS)
    sees(other, KEYS)
    rows = other.tier.prepare_load(KEYS, "loads")
    other.tier.reset_cache()
    assert other.tier.resident_run(KEYS) == (0, 0)
    other.tier.complete_load(rows)
    sees(other, KEYS)
    for prompt in range(2, 8):
        other.store(chain(prompt, 60))
    assert set(other.tier._row_of.values()) - set(other.tier._borrowed) <= set(other.loan.own)
    one.check()
    assert other.load(KEYS) == 30


def test_a_reset_while_a_check_is_under_way_leaves_no_row_behind(start, monkeypatch):
    one, other = start(), start()
    stored(one, KEYS)
    wait_until(lambda: KEYS[-1] in other.loan._neighbours.places, "it is not followed")
    checks = []
    with monkeypatch.context() as patched:
        patched.setattr(other.loan._neighbours._hashing, "submit", lambda *check: checks.append(check))
        assert other.tier.resident_run(KEYS) == (30, 30)
        other.tier.reset_cache()
    for check, *what in checks:
        check(*what)
    other.tier.poll()
    assert (pins(one), other.tier.chunks, other.tier.quarantined_rows, other.tier.misuse) == (0, 0, 0, 0)


def test_rows_that_others_read_are_no_room_and_do_not_leave(start):
    one, other = start(), start()
    stored(one, chain(1, 100))
    sees(other, chain(1, 50))
    one.tier.release_expired(0)
    assert (one.tier.pinned_rows, one.tier.evictable) == (50, 50)
    for prompt in range(2, 6):
        assert one.tier.prepare_store(chain(prompt, 60), "stores") is None
    assert one.tier.chunks == 100
    other.tier.release_expired(math.inf)
    one.tier.release_expired(0)
    assert (one.tier.pinned_rows, one.tier.evictable) == (0, 100)


def test_of_a_store_whose_rows_others_have_just_pinned_the_chunks_before_them_are_stored(start):
    one, other = start(), start()
    stored(one, chain(1, 100))
    sees(other, chain(1, 100)[94:95])
    allocation = one.tier.prepare_store(chain(2, 15), "stores")
    assert len(allocation.rows) == 9, "the tenth row that is taken is read"
    one.tier.complete_store(allocation.rows, True)
    other.tier.release_expired(math.inf)
    one.tier.release_expired(0)
    assert one.tier.quarantined_rows == 0
    assert one.tier.free_rows + one.tier.chunks == 100


def test_a_chunk_that_its_owner_stores_again_is_found_again(start):
    one, other = start(), start()
    for _ in range(3):
        stored(one, KEYS)
        stored(one, chain(2, 50))
        wait_until(lambda: other.load(KEYS) == 30, "it is not found")
        other.tier.release_expired(math.inf)
        one.tier.release_expired(0)
        one.tier.forget(chain(2, 50))
        one.tier.forget(KEYS)


def test_of_two_copies_one_is_found_when_the_other_has_left(path):
    KeeperThread(path, 3 * 50 * LAYOUT.row_stride, parts=3)
    engines = [PoolEngine(path) for _ in range(3)]
    for engine in engines[:2]:
        engine.tier._borrow = lambda keys: None  # as if both had computed it at once
        stored(engine, KEYS[:10])
    third = engines[2]
    sees(third, KEYS[:10])
    third.tier.release_expired(math.inf)
    for engine in engines[:2][::-1]:
        engine.tier.forget(KEYS[:10])
        stored(engine, chain(engines.index(engine) + 5, 50))
        left = 10 if engine is engines[1] else 0
        wait_until(partial(lambda left: third.load(KEYS[:10]) == left, left), "it is not followed")


@pytest.mark.parametrize("dies", ["before the next keeper comes", "before it has come back to the next keeper"])
def test_an_engine_that_dies_between_two_keepers_leaves_no_pin_and_its_part_is_checked(path, dies):
    keeper = KeeperThread(path, SIZE, parts=2)
    one, other = PoolEngine(path), PoolEngine(path, look_seconds=1000)
    stored(one, KEYS)
    stored(other, chain(2, 20))
    sees(other, KEYS)
    other.row(*other.rows_of(chain(2, 20)[3:4]))[7] ^= 1  # a stray write
    keeper.stop()
    other.loan._find_keeper = lambda: None
    if dies == "before the next keeper comes":
        other.close()
    keeper = KeeperThread(path, SIZE, handover=60, parts=2)
    wait_until(lambda: keeper.figures()["parts"][0]["engine_connected"], "it is not brought")
    if dies != "before the next keeper comes":
        assert keeper.figures()["parts"][1]["lent"], "by its lock"
        other.close()
    wait_until(lambda: keeper.figures()["damaged"] == 1, "its part is not checked")
    assert pins(one) == 0
    third = PoolEngine(path)
    assert third.check() == 19


def test_a_chunk_that_is_named_twice_is_given_back_once(start):
    one, other = start(), start()
    stored(one, KEYS)
    sees(other, KEYS)
    rows = other.tier.prepare_load([*KEYS, *KEYS], "loads")
    other.tier.complete_load(rows)
    assert (pins(one), other.tier.pinned_rows, other.tier.misuse) == (0, 0, 0)


def test_a_load_that_ends_after_the_engine_was_closed_changes_nothing(start, path):
    one, other = start(), PoolEngine(path)
    stored(one, KEYS)
    sees(other, KEYS)
    rows = other.tier.prepare_load(KEYS, "loads")
    other.close()
    other.tier.complete_load(rows)


def test_a_chunk_that_is_there_no_more_counts_as_lacking(start):
    one, other = start(), start()
    stored(one, KEYS)
    wait_until(lambda: not other.tier.lacks_all(KEYS[-1:]), "it is not followed")
    one.loan.renew(one.rows_of(KEYS))
    assert other.tier.lacks_all(KEYS)


def test_a_thread_that_cannot_be_had_costs_time_alone(start, monkeypatch):
    one, other = start(), start()
    stored(one, KEYS)
    wait_until(lambda: KEYS[-1] in other.loan._neighbours.places, "it is not followed")

    def none(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(other.loan._neighbours._hashing, "submit", none)
    assert other.load(KEYS) == 30


def test_a_borrowed_chunk_is_never_clean_or_left_to_be_forgotten(start):
    one, other = start(), start()
    stored(one, KEYS)
    sees(other, KEYS)
    other.tier.mark_clean(KEYS)
    assert other.tier.forget(KEYS) == []
    before = other.tier.changes
    other.tier.release_expired(math.inf)
    assert (other.tier.clean_rows, other.tier.chunks) == (0, 0)
    assert other.tier.changes > before


def test_a_borrowed_chunk_is_its_owners_to_write_to_a_tier(start):
    one, other = start(), start()
    stored(one, KEYS)
    other.store(chain(2, 5))
    sees(other, KEYS)
    assert other.load(KEYS[:10]) == 10
    rows = other.tier.prepare_load(KEYS[:10], "a request")
    assert one.tier.to_offer(KEYS) == KEYS
    assert other.tier.to_offer([*KEYS, *chain(2, 5)]) == chain(2, 5)
    other.tier.complete_load(rows)


@pytest.fixture
def left(path):
    """What an engine has left that has ended, beside two neighbours, which are ready to write it."""
    KeeperThread(path, 3 * 100 * LAYOUT.row_stride, parts=3)
    one, *others = (PoolEngine(path) for _ in range(3))
    stored(one, KEYS)
    for other in others:
        assert other.tier.take_left() == []
        wait_until(lambda other=other: KEYS[-1] in other.loan._neighbours.places, "it is not followed")
    one.close()
    return others


def taken(engines):
    """Wait until one of these engines is to offer something; return it, what that is, and the others."""
    found = []
    wait_until(lambda: found.extend((at, keys) for at in engines if (keys := at.tier.take_left())) or found, "left")
    ((taker, keys),) = found
    return taker, keys, [engine for engine in engines if engine is not taker]


def looked(engine):
    """Have an engine look for what others have left once more."""
    looks, look = [], engine.loan._neighbours.claim_parts
    engine.loan._neighbours.claim_parts = lambda loan: looks.append(look(loan))
    wait_until(lambda: len(looks) > 1, "it does not look")


def test_what_an_engine_left_is_one_neighbours_to_offer_until_that_has_ended_too(left):
    taker, keys, (other,) = taken(left)
    assert keys == KEYS
    looked(other)
    assert (other.tier.take_left(), other.tier.to_offer(KEYS)) == ([], [])
    assert taker.tier.to_offer(KEYS) == KEYS
    taker.close()
    left.remove(taker)
    assert taken(left)[1] == KEYS


def test_after_a_reset_what_others_have_left_is_offered_once_more(left):
    taker, keys, _ = taken(left)
    taker.tier.reset_cache()
    again, same, _ = taken(left)
    assert (again, same) == (taker, keys)


def test_what_others_have_left_is_listed_once_more_after_a_reset_during_a_list_too(left, monkeypatch):
    taker, _, _ = taken(left)
    neighbours, lists = taker.loan._neighbours, []

    def reset_meanwhile(*part):
        lists.append(part)
        if len(lists) == 1:
            neighbours.list_again()
        return residents(*part)

    monkeypatch.setattr(neighbours_module, "residents", reset_meanwhile)
    neighbours.list_again()
    wait_until(lambda: len(lists) > 1, "it is not listed again")
    looked(taker)
    assert len(lists) == 2


def test_a_part_whose_engines_come_and_go_is_listed_once(path):
    KeeperThread(path, SIZE, parts=2)
    one, other = PoolEngine(path), PoolEngine(path)
    stored(one, KEYS)
    assert other.tier.take_left() == []
    neighbours = other.loan._neighbours
    for _ in range(3):
        one.close()
        wait_until(lambda: neighbours._claimed, "it is not claimed")
        one = PoolEngine(path)
        wait_until(lambda: not neighbours._claimed, "it is claimed still")
    one.close()
    wait_until(lambda: neighbours._claimed, "it is not claimed")
    assert taken([other])[1] == KEYS
    assert other.tier.take_left() == []


def test_the_next_engine_of_a_part_offers_what_is_in_it_itself(path, left):
    taker, _, _ = taken(left)
    owner = PoolEngine(path)
    left.append(owner)
    assert owner.tier.to_offer(KEYS) == KEYS
    wait_until(lambda: not taker.tier.to_offer(KEYS), "it is not seen")
    left.remove(owner)
    owner.close()
    assert taken(left)[1] == KEYS, "by whichever"


def test_a_row_that_a_store_job_reads_is_not_written_to_by_its_next_engine(path, left):
    taker, _, _ = taken(left)
    assert taker.tier.prepare_read(KEYS) is None, "before a check"
    taker.await_checks(KEYS)
    rows = taker.tier.prepare_read(KEYS)
    owner = PoolEngine(path)
    left.append(owner)
    for prompt in range(2, 12):
        owner.store(chain(prompt, 30))
        owner.tier.release_expired(0)
    taker.compare(KEYS, rows)
    taker.tier.complete_read(rows)
    assert not owner.loan._plane.pinned(rows)
    owner.tier.release_expired(0)
    stored(owner, chain(12, 100))
    assert owner.load(chain(12, 100)) == 100


def test_a_chunk_that_was_left_and_is_damaged_is_not_offered(path, left, over):
    wait_until(lambda: pool_figures(str(path))["checked"] == len(KEYS), "the keeper does not check it")
    left[0].row(3)[7] ^= 1
    taker, _, _ = taken(left)
    neighbours = taker.loan._neighbours
    is_sound = neighbours._is_sound
    neighbours._is_sound = lambda *chunk: over.wait(60) and is_sound(*chunk)
    assert taker.tier.prepare_read(KEYS) is None
    assert taker.tier.to_offer(KEYS) == KEYS, "it is not known yet"
    over.set()
    taker.await_checks(KEYS)
    assert taker.tier.to_offer(KEYS) == KEYS[:3] + KEYS[4:]


def test_a_chunk_that_was_damaged_after_its_first_use_here_is_not_offered_though_no_keeper_checks_it(path):
    keeper = KeeperThread(path, SIZE, parts=2)
    one, other = PoolEngine(path), PoolEngine(path)
    stored(one, KEYS)
    other.tier.take_left()
    sees(other, KEYS)
    assert other.load(KEYS) == len(KEYS)
    keeper.stop()
    one.row(3)[7] ^= 1
    one.close()
    taken([other])
    assert other.tier.prepare_read(KEYS) is None, "before a check"
    other.await_checks(KEYS)
    assert other.tier.to_offer(KEYS) == KEYS[:3] + KEYS[4:]


def test_what_the_keeper_publishes_after_an_engines_end_is_taken_in_too(path):
    keeper = KeeperThread(path, SIZE, parts=2)
    one, other = PoolEngine(path), PoolEngine(path)
    stored(one, KEYS)
    other.tier.take_left()
    wait_until(lambda: KEYS[-1] in other.loan._neighbours.places, "it is not followed")
    index, (row,) = keeper.keeper._memory.arenas[0].index, one.rows_of(KEYS[:1])
    digest, edition = index.digest(row), one.loan._plane.edition(row)
    index.void(row)
    wait_until(lambda: KEYS[0] not in other.loan._neighbours.places, "it is not followed")
    one.close()
    assert taken([other])[1] == KEYS[1:]
    index.write(row, edition, KEYS[0], digest)
    assert taken([other])[1] == KEYS[:1]


def test_what_an_engine_of_other_weights_left_is_nobodys_to_offer(path):
    KeeperThread(path, SIZE, parts=2)
    one, other = PoolEngine(path), PoolEngine(path, prefix=PREFIX.replace("default", "other"))
    stored(one, KEYS)
    other.tier.take_left()
    one.close()
    looked(other)
    assert other.tier.take_left() == []
