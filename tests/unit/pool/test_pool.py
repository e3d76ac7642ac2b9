"""A pool: what the next engine finds, what it never finds, and who gets the memory when."""

import contextlib
import logging
import os
import random
import signal
import socket
import threading

import numpy as np
import pytest
from tests.pool_rig import LAYOUT, PREFIX, KeeperThread, PoolEngine, chain, pool_figures, sleeping, wait_until, watch

from kvtiers.api import LookupResult, StartError
from kvtiers.layout.cache_layout import CacheLayout, KVGroup, KVTensor, ModelIdentity
from kvtiers.pool import arena as arena_module
from kvtiers.pool import keeper_memory
from kvtiers.pool import loan as loan_module
from kvtiers.pool.arena import Arena
from kvtiers.pool.chunk_hash import ChunkHash
from kvtiers.pool.descriptor_store import DescriptorStore
from kvtiers.pool.keeper_memory import KeeperMemory
from kvtiers.pool.kept import KeptMemory
from kvtiers.pool.listening import listen
from kvtiers.pool.loan import PoolLoan, clear_pool, is_served
from kvtiers.pool.memory import Index, Plane, Shape, residents
from kvtiers.pool.messages import Welcome, send
from kvtiers.primary.tier import PoolState
from kvtiers.testing.running import descriptors_left_since, open_descriptors

ROWS = 100
SIZE = ROWS * LAYOUT.row_stride
KEYS = chain(1, 30)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "pool.sock"


@pytest.fixture
def slow(monkeypatch, over):
    """An event that each piece of a keeper's check waits for."""
    damaged_of = Arena.damaged_of

    def wait_first(arena, part, rows):
        over.wait(60)
        return damaged_of(arena, part, rows)

    monkeypatch.setattr(Arena, "damaged_of", wait_first)
    return over


@pytest.fixture
def keeper(path):
    return KeeperThread(path, SIZE)


def figures_when(keeper, **wanted):
    """The keeper's figures, once these are among them."""
    found = []

    def are_there():
        found.append(keeper.figures())
        return found[-1] | wanted == found[-1]

    wait_until(are_there, f"not {wanted}")
    return found[-1]


def stored(path, *keys, **more):
    """An engine that has stored these prompts, all of it published."""
    engine = PoolEngine(path, **more)
    for prompt in keys:
        engine.store(prompt)
    wait_until(engine.is_published, "it is not published")
    return engine


def test_the_next_engine_finds_every_chunk_in_its_row_and_byte(path, keeper):
    keys = [*KEYS, *chain(2, 40)]
    engine = stored(path, KEYS, chain(2, 40))
    rows = engine.rows_of(keys)
    engine.close()
    engine = PoolEngine(path)
    assert engine.rows_of(keys) == rows
    assert engine.tier.adopted == engine.check() == 70
    assert engine.tier.evictable == 70
    assert engine.tier.free_rows == ROWS - 70
    engine.close()
    figures = figures_when(keeper, checked=140, checking=False)
    assert figures | {"engine": 0, "engines": 2, "damaged": 0} == figures


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_chunks_leave_in_the_order_of_their_last_use_whichever_engine_that_was(path, keeper, policy):
    engine = stored(path, chain(1, 30), chain(2, 30), chain(3, 30))
    engine.load(chain(1, 30))
    engine.close()
    engine = PoolEngine(path, policy=policy)
    assert engine.tier.coldest(60) == [*chain(2, 30)[::-1], *chain(3, 30)[::-1]]
    engine.store(chain(4, 40))
    assert engine.load(chain(1, 30)) == 30
    assert engine.load(chain(2, 30)) == 0


def test_events_name_what_was_there_at_the_start(path, keeper):
    stored(path, KEYS).close()
    engine = PoolEngine(path)
    (event,) = engine.tier.take_events()
    assert (set(event.keys), event.removed) == (set(KEYS), False)


def test_a_row_that_is_being_written_to_is_nobodys(path, keeper):
    engine = stored(path, chain(1, 100))
    allocation = engine.tier.prepare_store(chain(2, 10), "writes")
    engine.fill(chain(3, 10), allocation.rows)  # something else, and it never ends
    engine.close()
    engine = PoolEngine(path)
    assert engine.check() == 90
    assert engine.load(chain(2, 10)) == 0


def test_a_chunk_that_was_evicted_is_found_as_long_as_its_bytes_are_there_and_once(path, keeper):
    engine = stored(path, chain(1, 60))
    engine.tier._chunks._evict(60, [], "nobody")
    engine.store(chain(1, 20))  # in other rows, or in the same
    wait_until(engine.is_published, "it is not published")
    engine.close()
    engine = PoolEngine(path)
    assert engine.load(chain(1, 60)) == engine.check()


def test_what_is_cleared_while_it_is_checked_is_not_found_and_its_damage_is_not_lost(path, slow):
    keeper = KeeperThread(path, SIZE)
    engine = stored(path, KEYS)
    engine.row(*engine.rows_of(KEYS[7:8]))[123] ^= 1
    engine.close()
    figures_when(keeper, checking=True)
    assert clear_pool(str(path)) == 30
    slow.set()
    engine = PoolEngine(path)
    assert engine.tier.chunks == 0
    assert keeper.figures()["damaged"] == 1


def test_a_keeper_to_which_an_engine_may_be_about_to_bring_its_memory_does_not_say_that_it_is_cleared(path):
    KeeperThread(path, SIZE, handover=60)
    with pytest.raises(StartError, match="it has no memory yet; ask again in a moment"):
        clear_pool(str(path))


@pytest.mark.parametrize("what", ["reset_cache", "forget"])
def test_what_an_engine_was_told_to_forget_is_not_found(path, keeper, what):
    engine = stored(path, KEYS)
    engine.tier.reset_cache() if what == "reset_cache" else engine.tier.forget(KEYS)
    engine.close()
    engine = PoolEngine(path)
    assert engine.tier.chunks == 0


def test_a_chunk_whose_bytes_have_changed_is_not_found(path, keeper, caplog):
    engine = stored(path, KEYS)
    engine.row(*engine.rows_of(KEYS[7:8]))[123] ^= 1
    with caplog.at_level(logging.WARNING):
        engine.close()
        engine = PoolEngine(path)
    assert [found is LookupResult.HIT for found in engine.tier.find(KEYS)] == [place != 7 for place in range(len(KEYS))]
    assert keeper.figures()["damaged"] == 1, "before the next engine got it"
    assert "1 of them damaged" in caplog.text


def test_a_row_that_is_leased_again_while_it_is_hashed_is_not_published(path, monkeypatch):
    """The planted bug is the keeper that looks at the edition before hashing alone."""
    hash_row = ChunkHash.__call__

    def leased_again(chunk_hash, row, key):
        digest = hash_row(chunk_hash, row, key)
        if key in KEYS[:5]:
            engine.loan.renew([row])
        return digest

    monkeypatch.setattr(ChunkHash, "__call__", leased_again)
    keeper = KeeperThread(path, SIZE)
    engine = PoolEngine(path)
    rows = engine.store(KEYS)
    wait_until(lambda: keeper.figures()["published"] == 25, "it is not published")
    assert keeper.figures()["chunks"] == 25
    assert [engine.loan._index.editions[row] for row in rows[:5]] == [0] * 5


def test_chunks_of_other_weights_and_of_another_layout_are_not_found(path, keeper):
    engine = stored(path, KEYS)
    engine.tier.reset_cache()
    engine.loan.rename(PREFIX.replace("default", "other"))
    engine.store(chain(2, 10))
    wait_until(engine.is_published, "it is not published")
    engine.close()
    engine = PoolEngine(path)
    assert engine.tier.chunks == 0
    engine.store(KEYS)
    engine.close()
    large = CacheLayout(ModelIdentity("m", weights="w1"), (KVGroup("g", 16),), (KVTensor("t", 0, 8000),))
    engine = PoolEngine(path, layout=large, prefix="default/large-1/")
    assert (engine.tier.num_rows, engine.tier.chunks) == (ROWS // 2, 0)


def test_an_engine_waits_for_a_check_as_long_as_its_start_may_take_and_is_lent_nothing_once_it_has_given_up(path, slow):
    keeper = KeeperThread(path, SIZE)
    stored(path, KEYS).close()
    wait_until(lambda: keeper.figures()["checking"], "it does not check")
    with pytest.raises(StartError, match="its rows are being checked, for longer than this start can wait"):
        PoolEngine(path, deadline=2)
    slow.set()
    engine = PoolEngine(path)
    assert engine.check() == 30
    assert keeper.figures()["engines"] == 2


def test_who_gives_up_just_when_it_is_lent_the_memory_has_it_no_longer(path, keeper, monkeypatch):
    def refused(*_):
        raise StartError("it has given up")

    with monkeypatch.context() as patched:
        patched.setattr(PoolLoan, "__init__", refused)
        with pytest.raises(StartError, match="given up"):
            PoolEngine(path)
    PoolEngine(path)
    assert keeper.figures()["engines"] == 2


def test_an_engine_waits_for_the_one_before_it_and_not_for_one_at_work(path, keeper):
    engine = stored(path, KEYS)
    with pytest.raises(StartError, match=f"process {os.getpid()} has its memory"):
        PoolEngine(path, in_use_seconds=0.2)
    rows = engine.loan.take_rows()  # another process, as it were
    engine.close()
    wait_until(lambda: not keeper.figures()["watched"], "it waits for a process")
    figures = keeper.figures()
    assert (figures["engine"], figures["engine_connected"]) == (os.getpid(), False)
    with pytest.raises(StartError, match="has its memory"):
        PoolEngine(path, deadline=0.1)
    os.close(rows)
    engine = PoolEngine(path)
    assert engine.check() == 30


def test_a_start_that_may_wait_for_no_other_engine_still_hears_the_keeper_out(path, keeper):
    """A keeper's word takes a moment, and on a busy machine a long one."""
    wait_until(lambda: keeper.figures()["populated"], "it is not populated")
    PoolEngine(path, deadline=0)
    with pytest.raises(StartError, match=f"process {os.getpid()} has its memory"):
        PoolEngine(path, deadline=0)


def test_memory_is_taken_back_after_the_last_rank_has_ended(path, keeper):
    engine = stored(path, KEYS)
    with sleeping() as rank, sleeping() as gone:
        for number, process in enumerate((rank, gone)):
            watch(engine, number, process)
        engine.loan.unwatch(1)
        figures_when(keeper, processes=[{"pid": os.getpid(), "rank": -1}, {"pid": rank.pid, "rank": 0}])
        engine.close()
        wait_until(lambda: keeper.figures()["watched"] == 1, "it waits for others, or for none")
        assert keeper.figures()["checked"] == 0, "its copies may go on"
        rank.kill()
        figures_when(keeper, checked=30, checking=False)


def test_a_rank_that_leaves_and_comes_back_is_watched(path, keeper):
    engine = stored(path, KEYS)
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(sleeping()) for _ in range(20)]
        for rank in ranks:
            engine.loan.unwatch(0)
            watch(engine, 0, rank)
        for rank in ranks[:-1]:
            rank.kill()
            rank.wait()
        engine.close()
        wait_until(lambda: keeper.figures()["watched"] == 1, "the last one is not watched")
        assert keeper.figures()["checked"] == 0
    figures_when(keeper, checked=30, checking=False)


def test_the_end_of_the_process_that_was_a_rank_before_does_not_end_the_watch_of_the_next(
    path, keeper, monkeypatch, over
):
    """The keeper sees both at once: that another process is this rank now, and that the one before has ended."""
    hash_row, is_held = ChunkHash.__call__, threading.Event()

    def held(*chunk):
        is_held.set()
        over.wait(60)
        return hash_row(*chunk)

    engine = PoolEngine(path)
    with sleeping() as before, sleeping() as rank:
        watch(engine, 0, before)
        figures_when(keeper, watched=2)
        monkeypatch.setattr(ChunkHash, "__call__", held)
        engine.store(KEYS[:1])
        assert is_held.wait(60)
        watch(engine, 0, rank)
        before.kill()
        before.wait()
        over.set()
        wait_until(engine.is_published, "it is not published")
        figures_when(keeper, processes=[{"pid": os.getpid(), "rank": -1}, {"pid": rank.pid, "rank": 0}])
        engine.close()


def test_an_engine_that_lost_a_keeper_which_lives_comes_back_to_it_by_another_connection(path, keeper):
    engine = stored(path, KEYS)
    for _ in range(200):
        engine.loan.publish(KEYS, engine.rows_of(KEYS))
    wait_until(engine.loan._queue.empty, "it is not sent")
    engine.loan._lose("it took nothing for too long")
    wait_until(lambda: engine.loan._sock is not None, "it does not come back")
    engine.store(chain(2, 10))
    wait_until(engine.is_published, "it is not published")
    figures_when(keeper, engines=1, watched=1, engine_connected=True)
    wait_until(lambda: len(keeper.keeper._peers) == 1, "its first connection is held")


def test_memory_that_was_made_meanwhile_and_lent_to_nobody_is_given_up_for_an_engines(path):
    keeper = KeeperThread(path, SIZE)
    engine = stored(path, KEYS)
    keeper.stop()
    with engine.loan._sending:  # its interpreter is held, as it were
        keeper = KeeperThread(path, SIZE)
        wait_until(lambda: keeper.figures()["populated"], "it is not populated")
    wait_until(lambda: keeper.figures()["engine_connected"], "the memory is not brought")
    assert keeper.figures()["chunks"] == 30


def test_memory_that_is_given_up_while_it_is_populated_may_be_told_of_its_progress():
    with contextlib.closing(KeeperMemory(SIZE, 1, "off", KeptMemory(DescriptorStore()), lambda: None)) as memory:
        memory.make()
        memory.drop()
        assert not memory.populate(), "as by an event of a descriptor that has been closed since"


def test_an_engine_without_descriptors_for_a_while_is_an_engine_without_a_keeper_for_a_while(path, monkeypatch):
    keeper = KeeperThread(path, SIZE)
    stored(path, KEYS)
    keeper.stop()
    socket, refused = loan_module.socket.socket, []

    def none(*_):
        refused.append(1)
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(loan_module.socket, "socket", none)
        path.touch()  # so that it tries
        wait_until(lambda: refused, "it does not try")
    assert loan_module.socket.socket is socket
    path.unlink()
    keeper = KeeperThread(path, SIZE, handover=60)
    wait_until(lambda: keeper.figures()["engine_connected"], "the memory is not brought")


def test_an_engine_whose_talk_with_the_keeper_has_ended_does_not_say_that_it_has_its_pool(path, keeper):
    engine = stored(path, KEYS)
    engine.loan._queue.put(None)
    engine.loan._thread.join(60)
    assert engine.tier.figures()["pool"] == PoolState.ALONE


def test_an_engine_that_never_rests_brings_its_memory_too(path):
    keeper = KeeperThread(path, SIZE)
    engine = stored(path, KEYS, look_seconds=0.2)
    keeper.stop()
    keeper = KeeperThread(path, SIZE, handover=60)

    def busy():
        engine.loan.publish(KEYS[:1], engine.rows_of(KEYS[:1]))
        return keeper.figures()["engine_connected"]

    wait_until(busy, "the memory is not brought")


def test_an_engine_brings_its_memory_to_the_next_keeper_with_what_that_does_not_have(path, monkeypatch):
    keeper = KeeperThread(path, SIZE)
    engine = stored(path, KEYS)
    keeper.stop()
    engine.store(chain(2, 20))
    assert engine.load(KEYS) == 30, "without a keeper"
    assert not engine.is_published()
    wait_until(lambda: engine.tier.figures()["pool"] == PoolState.ALONE, "it does not say so")
    keeper = KeeperThread(path, SIZE, handover=60)
    wait_until(engine.is_published, "the memory is not brought")
    assert engine.tier.figures()["pool"] == PoolState.HELD
    engine.store(chain(3, 20))
    wait_until(engine.is_published, "it is not published")
    engine.close()
    engine = PoolEngine(path)
    assert engine.check() == 70


def test_a_keeper_whose_memory_an_engine_has_takes_no_other(path, keeper, caplog):
    engine = stored(path, KEYS)
    keeper.stop()
    with engine.loan._sending:  # it comes late
        another = KeeperThread(path, SIZE)
        second = stored(path, chain(2, 20))
    wait_until(lambda: "this keeper has other memory by now" in caplog.text, "it does not ask")
    assert engine.load(KEYS) == 30
    wait_until(lambda: not engine.loan._is_connected(), "it is connected")
    second.close()
    engine.close()
    assert caplog.text.count("other memory by now") == 2, "a line of the keeper's, and one of the engine's"
    figures_when(another, checked=20, checking=False)


def test_who_sends_what_it_may_not_is_sent_away_and_the_keeper_serves_on(path, keeper, caplog):
    chance = random.Random(1)
    for number in range(40):
        with loan_module._connect(str(path), 5) as sock:
            sock.send(bytes([0x90 + number % 16]) + chance.randbytes(20) if number else b"")
    engine = stored(path, KEYS)
    loan_module.send(engine.loan._sock, loan_module.Publish([ROWS], [1], [KEYS[0]]))
    wait_until(lambda: "rows that there are not" in caplog.text, "it is believed")
    engine.store(chain(2, 10))
    wait_until(engine.is_published, "it does not come back")
    assert engine.load(KEYS) == 30


def test_an_engine_of_another_format_is_refused_in_a_line(path, keeper, monkeypatch):
    monkeypatch.setattr(loan_module, "POOL_FORMAT", 99)
    with pytest.raises(StartError, match="format 99 is asked for, the keeper's is 3; run the same kvtiers in both"):
        PoolLoan.take(str(path), PREFIX, LAYOUT, 5)


def test_an_engine_for_which_no_descriptor_is_to_be_had_is_refused_and_the_next_one_is_not(path, keeper, monkeypatch):
    def none(*_):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(arena_module, "open_again", none)
        with pytest.raises(StartError, match="Too many open files"):
            PoolEngine(path)
    stored(path, KEYS).close()


def test_a_row_that_does_not_fit_is_refused_in_a_line(path, keeper):
    huge = CacheLayout(ModelIdentity("m"), (KVGroup("g", 16),), (KVTensor("t", 0, 2 * SIZE),))
    with pytest.raises(StartError, match="has no room for a row of"):
        PoolLoan.take(str(path), PREFIX, huge, 5)


def test_a_dead_keepers_socket_is_replaced_and_a_living_ones_is_not(path, keeper):
    with pytest.raises(StartError, match="another keeper serves there"):
        listen(path)
    assert is_served(str(path))
    keeper.keeper.stop()
    keeper._thread.join()
    keeper._listener.close()  # as by SIGKILL: the socket stays
    assert not is_served(str(path))
    with pytest.raises(StartError, match=r"no keeper serves at .*: Connection refused; start one"):
        pool_figures(path)
    listen(path).close()


def test_of_keepers_that_start_at_once_one_serves(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
        stale.bind(str(path))
    served = []

    def start():
        with contextlib.suppress(StartError):
            served.append(closing.enter_context(listen(path)))

    starts = [threading.Thread(target=start) for _ in range(8)]
    with contextlib.ExitStack() as closing:
        for each in starts:
            each.start()
        for each in starts:
            each.join()
        assert len(served) == 1
        assert is_served(str(path))


def test_only_this_user_can_connect(path, keeper):
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_engine_cannot_write_the_index_nor_change_the_size_of_anything(path, keeper):
    engine = stored(path, KEYS)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(engine.loan._index.fd, b"x", 0)
    for fd in (engine.loan._rows, engine.loan._plane.fd):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)


def test_nothing_is_left_behind(path):
    before = open_descriptors()
    keeper = KeeperThread(path, SIZE)
    for _ in range(3):
        stored(path, KEYS).close()
    keeper.stop()
    assert descriptors_left_since(before) == []
    assert not list(path.parent.iterdir())


# -- the memory


SHAPE = Shape(50 * 4096, 4096)


def test_an_entry_counts_with_its_edition_alone():
    index, plane = Index.create(SHAPE), Plane.create(SHAPE)
    plane.renew([3, 4])
    index.write(3, plane.edition(3), b"three-", b"3" * 16)
    index.write(4, plane.edition(4) + 1, b"four-", b"4" * 16)
    index.write(5, 0, b"five-", b"5" * 16)
    plane.use([3])
    assert list(residents(index, plane, plane.own)) == [([b"three-"], [3])]
    assert index.digest(3) == b"3" * 16
    plane.renew([3])
    assert list(residents(index, plane, plane.own)) == []
    index.close()


def test_a_edition_that_has_gone_round_is_never_zero():
    plane = Plane.create(SHAPE)
    plane.editions[7] = 2**32 - 1
    plane.renew([7])
    assert plane.edition(7) == 1
    plane.close()


def test_a_prefix_longer_than_a_use_has_depths_keeps_its_order_within_the_use():
    plane = Plane.create(Shape(5000 * 4096, 4096))
    plane.use(list(range(5000)))
    plane.use([1])
    assert plane.uses[0] < plane.uses[4999] < plane.uses[1]
    plane.close()


def test_an_index_of_other_rows_is_refused():
    index = Index.create(SHAPE)
    for other in (SHAPE._replace(nbytes=49 * 4096), SHAPE._replace(row_stride=8192), SHAPE._replace(parts=2)):
        with pytest.raises(StartError, match="other rows"):
            Index(os.dup(index.fd), other, writable=True)
    index.close()


def test_a_part_of_another_prefix_is_emptied_and_the_others_stay():
    shape = SHAPE._replace(parts=2)
    index = Index.create(shape)
    for row in (3, 30):
        index.write(row, 1, b"three-", b"3" * 16)
    index.rename(1, "default/m-2/")
    assert np.flatnonzero(index.editions).tolist() == [3]
    assert [index.prefix(part) for part in (0, 1)] == [(0, ""), (1, "default/m-2/")]
    with pytest.raises(StartError, match="a prefix of 2000 bytes"):
        index.rename(0, "x" * 2000)
    index.close()


def test_memory_that_could_not_be_taken_over_whole_is_nobody_elses_while_its_engine_has_it(path, monkeypatch):
    keeper = KeeperThread(path, SIZE)
    engine = stored(path, KEYS)
    keeper.stop()
    with monkeypatch.context() as patched:
        patched.setattr(KeptMemory, "keep_rows", lambda *_: (_ for _ in ()).throw(OSError(24, "Too many open files")))
        keeper = KeeperThread(path, SIZE, handover=60)
        wait_until(lambda: engine.loan._refused_at != (0, 0), "it is not refused")
    with pytest.raises(StartError, match="has its memory"):
        PoolEngine(path, in_use_seconds=0.1, deadline=0.2)
    engine.store(chain(2, 30))
    engine.close()
    engine = PoolEngine(path)
    assert engine.check() == 30


def test_a_keeper_that_can_start_no_thread_hashes_by_itself(path, monkeypatch):
    def none(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(keeper_memory.ThreadPoolExecutor, "submit", none)
    KeeperThread(path, SIZE)
    stored(path, KEYS).close()
    engine = PoolEngine(path)
    assert engine.check() == 30


def test_memory_whose_populating_was_killed_is_an_error():
    with contextlib.closing(KeeperMemory(64 << 20, 1, "off", KeptMemory(DescriptorStore()), lambda: None)) as memory:
        memory.make()
        os.kill(memory.prefault.pid, signal.SIGKILL)
        with pytest.raises(StartError, match=r"its memory cannot be populated: .*; lower --size, or make room"):
            wait_until(memory.populate, "it does not end")


def test_a_stray_word_among_the_last_uses_does_not_stop_the_next_engine(path, keeper):
    engine = stored(path, KEYS)
    engine.loan._plane.uses[5] = 2**64 - 1
    engine.close()
    engine = PoolEngine(path)
    engine.store(chain(2, 20))
    assert engine.check() == 50


def test_keys_that_are_too_long_are_not_published_and_cost_no_connection(path, keeper):
    engine = PoolEngine(path)
    engine.loan.publish([bytes(2000)] * 80, range(80))
    engine.store(KEYS)
    wait_until(engine.is_published, "it is not published")
    assert keeper.figures() | {"published": 30, "published_late": 0, "engines": 1} == keeper.figures()


def test_an_engine_that_lost_its_keeper_a_moment_ago_gives_the_memory_back_at_its_end(path, keeper):
    engine = stored(path, KEYS, look_seconds=60)
    engine.loan._lose("as by a keeper that took nothing for a while")
    engine.close()
    figures_when(keeper, lent=False)


def test_descriptors_of_an_answer_that_cannot_be_used_are_closed():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        before = open_descriptors()
        send(theirs, Welcome(4096, 4096, 0, 1), [0, 1])
        with pytest.raises(StartError, match="out of place"):
            loan_module._welcome(ours, 5, 5)
        assert not descriptors_left_since(before)


def test_a_keeper_that_is_stopped_with_a_full_backlog_is_alive(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stopped, contextlib.ExitStack() as callers:
        stopped.bind(str(path))
        stopped.listen(0)
        for _ in range(3):
            caller = callers.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            caller.setblocking(False)
            caller.connect_ex(str(path))
        with pytest.raises(StartError, match="another keeper serves there"):
            listen(path)
