"""Several engines with several hosts each on one store: a prompt that all of them compute is written once."""

from itertools import pairwise

import pytest

REPLICAS, HOSTS, CHUNKS = 3, 2, 128
SLICE = 32  # what a step of the prefill computes: enough for every host to get a part


@pytest.fixture
def replicas(start, faulty, gates):
    """Engines that share one store; who asks it and who writes to it is noted."""
    tier = faulty(processes=HOSTS, exists_ttl="1h", deadline="1h")
    for stage in ("exists", "write"):
        gates.set(stage, "always sleep 0")
    engines = [start(tier) for _ in range(REPLICAS)]
    for engine in engines:
        engine.until(lambda engine=engine: engine.own()["hosts_open"] == HOSTS, "all its hosts")
    return engines


def written(engine):
    return engine.figures()["stored_bytes"] // 4096


def in_slices(chunks):
    bounds = range(0, len(chunks) + SLICE, SLICE)
    return [chunks[begin:end] for begin, end in pairwise(bounds)]


def test_a_prompt_that_all_hosts_of_all_replicas_get_is_written_once(replicas, gates, machine):
    prompt = machine.keys(0, CHUNKS)
    for engine in replicas:
        engine.store(prompt)
    first, *others = replicas
    assert set(gates.callers("write")) == set(first.each_host().values()), "all hosts of the first, and no other"
    assert len(gates.callers("write")) == len(gates.values()) == CHUNKS
    assert [written(engine) for engine in others] == [0] * len(others)
    assert [engine.own()["already_present"] for engine in others] == [CHUNKS] * len(others)
    for engine in replicas:
        engine.forget()
        assert engine.load(prompt) == CHUNKS


def test_replicas_that_compute_a_prompt_side_by_side_write_each_value_once(replicas, gates, machine):
    """Each in its turn is ahead of the others, who find what it has written, in whichever of their hosts."""
    slices = in_slices(machine.keys(0, CHUNKS))
    for number, part in enumerate(slices):
        ahead = number % REPLICAS
        for engine in [*replicas[ahead:], *replicas[:ahead]]:
            engine.store(part)
    assert len(gates.callers("write")) == len(gates.values()) == CHUNKS
    assert [written(engine) for engine in replicas] == [2 * SLICE, SLICE, SLICE]
    tails = [machine.keys(1000 * (number + 1), SLICE) for number in range(REPLICAS)]
    for engine, tail in zip(replicas, tails, strict=True):
        engine.store(tail)
    assert len(gates.callers("write")) == len(gates.values()) == CHUNKS + REPLICAS * SLICE, "what differs is written"
