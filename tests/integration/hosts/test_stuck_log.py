"""An engine whose standard error is a pipe that is full and never read goes on all the same, and ends."""

import contextlib
import os
import signal


def full_pipe():
    """A pipe that takes nothing more, whose writers block."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for piece in (b"x" * 65536, b"x"):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, piece)
    os.set_blocking(writer, True)
    return reader, writer


def test_no_call_of_the_engine_waits_for_a_log_that_is_not_read(party, faulty, gates, machine):
    reader, writer = full_pipe()
    engine = party(stuck_stderr=writer)
    os.close(writer)
    engine.do("import logging; logging.basicConfig(level=logging.INFO)")
    engine.engine(faulty(deadline="1h", grace="1h"))
    engine.do("engine.store(keys(0, 8)); engine.forget()")
    # Parameters, a tier that raises, jobs past their deadline, a host that dies, more lines than the queue holds.
    engine.do("from kvtiers.scheduler.options import RequestLimits; from kvtiers.types import RequestContext")
    engine.do("for n in range(64): RequestLimits.of(RequestContext('r', {'max_load_tokens': 'x'}))")
    gates.set("read", "hang")
    engine.do("ctx = engine.request(); engine.until(lambda: engine.lookup(keys(0, 8), ctx).pending)")
    engine.do("engine.step(); engine.until(lambda: engine.figures()['failed_loads'], 'the deadline', wind=3600)")
    os.kill(engine.do("engine.host()"), signal.SIGKILL)
    engine.do("engine.until(lambda: engine.own()['host_starts'] > 1, 'another host')")
    engine.do("for n in range(3000): logging.getLogger('kvtiers.tiering').warning('line %d', n)")
    assert engine.do("engine.step() or engine.manager.stats()['engine']['dropped_log_lines']") > 1000
    gates.lift("read")
    engine.do("engine.close()")
    engine.process.communicate(timeout=machine.PATIENCE)
    assert engine.process.returncode == 0
    os.close(reader)
