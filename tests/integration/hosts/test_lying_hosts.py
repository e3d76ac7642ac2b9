"""A host that does not keep to the protocol is killed; its jobs fail, its rows come free, and an honest one follows."""

import time
from pathlib import Path

import pytest

from kvtiers import _process

HERE = Path(__file__).parent
START = """
import sys, json
sys.path[:] = [*json.loads(sys.argv[-2]), {here!r}]
import lying_host
if not lying_host.main({orders!r}):
    from kvtiers.host.__main__ import main
    main()
"""


@pytest.fixture
def liar(start, faulty, tmp_path, monkeypatch):
    """Start an engine whose host lies in its first life."""

    def liar(lie):
        orders = tmp_path / "orders"
        orders.write_text(lie)
        monkeypatch.setattr(_process, "_START", START.format(here=str(HERE), orders=str(orders)))
        return start(faulty())

    return liar


def honest_again(engine, machine):
    engine.until(lambda: engine.own()["host_starts"] == 2, "its second life")
    engine.until_available()
    wanted = machine.keys(500, 8)
    engine.store(wanted)
    engine.forget()
    assert engine.load(wanted) == 8
    assert engine.figures()["pinned_rows"] == 0
    assert engine.figures()["raised"] == 0, "nothing of it reached the engine as an exception"


def test_a_host_that_speaks_nonsense_is_ended(liar, machine, log):
    engine = liar("garbage")
    engine.until(lambda: log.lines("it does not keep to the protocol"), "its end")
    honest_again(engine, machine)


def test_a_host_that_reports_a_job_twice_is_ended(liar, machine, log):
    engine = liar("twice")
    engine.until_available()
    engine.put(machine.keys(0, 4))
    engine.until(lambda: log.lines("it does not keep to the protocol"), "its end")
    honest_again(engine, machine)


@pytest.mark.parametrize("lie", ["flood_log", "flood_figures", "flood_opened"])
def test_a_flood_ends_the_host_and_does_not_fill_the_engine(liar, machine, log, lie):
    begin = time.monotonic()
    engine = liar(lie)
    engine.until(lambda: log.lines("it floods the engine"), "its end")
    assert len(engine.group()._hosts[0].backend._events) < 5000
    assert len(log.lines("flood flood")) <= 500 + 200 * (time.monotonic() - begin), "what a host may send unasked"
    honest_again(engine, machine)


def test_a_host_that_hangs_up_but_lives_on_is_killed(liar, machine, log):
    engine = liar("hangs_up")
    engine.until(lambda: log.lines("its host is killed: it has closed its connection"), "its end")
    honest_again(engine, machine)
