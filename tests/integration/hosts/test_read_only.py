"""A tier that an operator switches to read-only while it serves: nothing is deleted from its store."""

import pytest

WAYS = {"one host": {}, "three hosts": {"processes": 3}, "a thread": {"io": "thread"}}


@pytest.fixture(params=WAYS.values(), ids=WAYS.keys())
def engine(start, faulty, request):
    engine = start(faulty(**request.param))
    engine.until_available()
    return engine


def test_a_damaged_value_stays_while_the_tier_is_read_only_and_is_replaced_afterwards(engine, gates, machine):
    wanted = machine.keys(0, 8)
    engine.store(wanted)
    (file,) = [path for path in (gates.root / "values").iterdir() if wanted[3].hex() in path.name]
    value = file.read_bytes()
    file.write_bytes(value[:7] + bytes([value[7] ^ 1]) + value[8:])
    engine.manager.tier_commands.switch("faulty", "read-only")
    engine.forget()
    assert engine.load(wanted) == 3
    assert file.exists()
    engine.manager.tier_commands.switch("faulty", "on")
    engine.forget()
    engine.store(wanted)
    assert file.read_bytes() == value
