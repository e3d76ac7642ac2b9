import threading

from kvtiers.api import make_offload_key
from kvtiers.host.messages import StoreJob
from kvtiers.host.transfer_queue import PoolJob, TransferQueue
from kvtiers.host.value_run import Moved
from kvtiers.layout.storage_name import StorageNames

NAMES = StorageNames("test/model-0123456789abcdef01234567/", bytes(8))
SLICES = 400


def job_of(job_id: int, *, is_load: bool) -> PoolJob:
    keys = [make_offload_key(bytes([number % 256]) * 8, 0) for number in range(SLICES)]
    return PoolJob.of(StoreJob(job_id, is_load, keys, [*range(SLICES)]), NAMES)


def test_the_busy_seconds_of_jobs_that_overlap_add_up_to_the_time_in_which_any_ran():
    queue = TransferQueue(2)
    first, second, third = (job_of(number, is_load=True) for number in range(3))
    store, never = job_of(3, is_load=False), job_of(4, is_load=True)
    for job, begun in ((first, 10.0), (second, 11.0), (store, 11.0)):
        assert queue.begin(job, begun)
    assert not queue.begin(first, 12.0)
    assert queue.busy_seconds(second, 13.0) == 3.0
    assert queue.busy_seconds(first, 14.0) == 1.0
    assert queue.busy_seconds(store, 14.0) == 3.0, "stores are counted apart"
    assert queue.begin(third, 20.0)
    assert queue.busy_seconds(third, 21.0) == 1.0, "nothing ran before it"
    assert queue.busy_seconds(never, 22.0) == 0.0


def test_stores_take_no_more_threads_than_they_may_and_leave_one_to_loads():
    for threads, store_threads, expected in ((4, None, 3), (4, 1, 1), (4, 2, 2), (2, 2, 1), (1, 1, 1)):
        queue = TransferQueue(threads, store_threads)
        assert queue.add(job_of(0, is_load=False), 1)
        taken = 0
        while queue._storing < queue._most_stores:
            assert queue.next() is not None
            taken += 1
        assert taken == expected
        assert queue.add(job_of(1, is_load=True), 1)
        assert queue.next().of.job.is_load
    queue.set_threads(1, None)
    assert queue._most_stores == 1


def test_a_removal_keeps_neither_loads_nor_stores_busy():
    queue = TransferQueue(2)
    store, other = (job_of(number, is_load=False) for number in range(2))
    removal = PoolJob.of(StoreJob(2, is_load=False, keys=store.job.keys, rows=(), is_delete=True), NAMES)
    assert queue.begin(removal, 10.0)
    assert not queue.begin(removal, 11.0)
    assert queue.begin(store, 12.0)
    assert queue.busy_seconds(store, 13.0) == 1.0, "the removal before it is no store"
    assert queue.busy_seconds(removal, 20.0) == 0.0
    assert queue.begin(other, 20.0)
    assert queue.busy_seconds(other, 21.0) == 1.0


def test_no_slice_is_left_lying_while_a_thread_waits():
    queue = TransferQueue(3)
    jobs = [job_of(number, is_load=number % 2 == 1) for number in range(8)]
    left = threading.Semaphore(0)

    def work() -> None:
        while (piece := queue.next()) is not None:
            queue.finish(piece, Moved.nothing(1))
            if not piece.of.job.is_load:
                queue.store_done()
            left.release()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for job in jobs:
        assert queue.add(job, 1)
        for _ in range(SLICES // 2):  # the next one comes in the middle of this one
            assert left.acquire(timeout=60)
    for _ in range(len(jobs) * SLICES // 2):
        assert left.acquire(timeout=60)
    assert not any(job.slices_left for job in jobs)
    queue.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
