"""A value that is there and cannot be loaded is written again by the next store, by any host."""

import os
import signal

import pytest

CHUNKS, BAD = 40, 20
WAYS = {
    "one host": {},
    "three hosts": {"processes": 3},
    "a thread": {"io": "thread"},
}


@pytest.fixture(params=WAYS.values(), ids=WAYS.keys())
def engine(start, faulty, request):
    engine = start(faulty(exists_ttl="1h", **request.param))
    engine.until_available()
    if hosts := request.param.get("processes"):
        engine.until(lambda: engine.own()["hosts_open"] == hosts, "all its hosts")
    return engine


@pytest.fixture
def cut_short(engine, gates, machine):
    """Chunks in the tier, and not in the primary, one of which is too short; returns them and its file."""
    wanted = machine.keys(0, CHUNKS)
    engine.store(wanted)
    (file,) = [path for path in (gates.root / "values").iterdir() if wanted[BAD].hex() in path.name]
    file.write_bytes(file.read_bytes()[:100])
    engine.forget()
    assert engine.load(wanted) == BAD
    assert file.stat().st_size == 100, "it is not ours to delete"
    return wanted, file


def stored_again(engine, wanted):
    """Store all of these again, and return how many were written and how many were there already."""
    engine.forget()
    before = engine.own()["already_present"], engine.figures()["stored_bytes"]
    engine.store(wanted)
    return (engine.figures()["stored_bytes"] - before[1]) // 4096, engine.own()["already_present"] - before[0]


def test_the_next_store_writes_it_and_nothing_else(engine, cut_short, machine):
    wanted, file = cut_short
    assert stored_again(engine, wanted) == (1, CHUNKS - 1)
    assert file.stat().st_size == machine.VALUE
    engine.forget()
    assert engine.load(wanted) == CHUNKS
    assert stored_again(engine, wanted) == (0, CHUNKS), "it is not doubted any more"


def test_a_question_in_between_that_the_store_answers_with_yes_changes_nothing(engine, cut_short, gates, machine):
    wanted, _ = cut_short
    engine.wind(7200.0)  # no answer is believed any more
    asked = engine.own()["lookup_questions"]
    assert engine.load(wanted) == BAD, "it was there again, and again it was not given"
    assert engine.own()["lookup_questions"] > asked
    assert stored_again(engine, wanted) == (1, CHUNKS - 1)
    engine.forget()
    assert engine.load(wanted) == CHUNKS


def test_a_store_that_fails_leaves_it_to_the_next(engine, cut_short, gates, machine):
    wanted, file = cut_short
    gates.set("write", "fail")
    assert stored_again(engine, wanted) == (0, CHUNKS - 1)
    assert not file.exists(), "it was deleted before the write"
    assert stored_again(engine, wanted) == (1, CHUNKS - 1)
    engine.forget()
    assert engine.load(wanted) == CHUNKS


@pytest.mark.parametrize("engine", [WAYS["one host"]], ids=["one host"], indirect=True)
def test_a_restarted_host_writes_it_all_the_same(engine, cut_short):
    wanted, _ = cut_short
    starts = engine.own()["host_starts"]
    os.kill(engine.host(), signal.SIGKILL)
    engine.until(lambda: engine.own()["host_starts"] > starts, "another host")
    engine.until_available()
    assert stored_again(engine, wanted) == (1, CHUNKS - 1)
