"""One lock, held by the thread that steps: other threads complete, finish, read figures and shut down beside it."""

import threading

from kvtiers.types import PromptGroup

MEMORY = {"type": "memory", "capacity": "4MiB", "io": "thread"}


def test_workers_may_report_from_another_thread_under_the_lock(start, keys):
    engine = start(MEMORY, rows=64)
    manager = engine.manager
    plans, done, problems = [], threading.Event(), []
    there = threading.Condition()

    def report():
        while True:
            with there:
                there.wait_for(lambda: plans or done.is_set(), timeout=30)
                if not plans:
                    return
                plan, ctx = plans.pop()
            with manager.lock:
                manager.complete_store(plan)
                manager.on_request_finished(ctx)
            try:
                assert manager.stats()["engine"]["misuse"] == 0
            except AssertionError as error:
                problems.append(error)

    reporter = threading.Thread(target=report)
    reporter.start()
    try:
        for number in range(300):
            with manager.lock:
                ctx = engine.request()
                wanted = keys(4, f"n{number}-")
                assert manager.reach([PromptGroup(wanted)], ctx).in_chunks(manager.tokens_per_chunk[0]).ready == 0
                plan = manager.prepare_store(wanted, ctx)
                if plan is not None:
                    engine.write(plan)
                manager.on_schedule_end()
            if plan is not None:
                with there:
                    plans.append((plan, ctx))
                    there.notify()
    finally:
        done.set()
        with there:
            there.notify()
        reporter.join(30)
    assert not reporter.is_alive()
    assert not problems
    engine.settle()
    assert manager.stats()["engine"]["misuse"] == 0
    assert manager.stats()["primary"]["pending_rows"] == 0


def test_an_engine_that_steps_on_while_it_is_shut_down_finds_nothing_and_harms_nothing(start, keys):
    engine = start(MEMORY)
    engine.store(keys(8))
    manager, closed, problems = engine.manager, threading.Event(), []

    def step():
        try:
            while not closed.is_set():
                with manager.lock:
                    ctx = engine.request()
                    manager.reach([PromptGroup(keys(8))], ctx).in_chunks(manager.tokens_per_chunk[0])
                    manager.on_request_finished(ctx)
                    manager.on_schedule_end()
            with manager.lock:
                reach = manager.reach([PromptGroup(keys(8))], engine.request())
                assert reach[:3] == (0, 0, False)
                manager.on_schedule_end()
        except BaseException as error:  # noqa: BLE001 -- shown by the test
            problems.append(error)

    stepping = threading.Thread(target=step)
    stepping.start()
    manager.shutdown(5)
    closed.set()
    stepping.join(30)
    assert not stepping.is_alive()
    assert not problems
