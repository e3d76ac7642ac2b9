"""What llm-d's router makes of KV events: bytes that its own decoder and index took, and what they found afterwards.

The golden file was made with its code, which is Go and cannot be run here: see docs/events.md. A batch of other bytes
has to be given to it again before it may be written there.
"""

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.llm_d_index import LlmDIndex

from kvtiers.api import make_offload_key
from kvtiers.kv_events.chunk_table import ChunkTable
from kvtiers.kv_events.naming import GroupFacts, Place
from kvtiers.kv_events.wire import Wire
from kvtiers.types import ChunkBlocks, OffloadEvent

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "kv_events-llm-d.json").read_text("utf-8"))
BLOCK, PER_CHUNK = 4, 2
GROUPS = [
    GroupFacts(0, BLOCK, "full_attention"),
    GroupFacts(1, BLOCK, "sliding_window", 64),
    GroupFacts(2, BLOCK, "mamba"),
]
PLACES = {
    "": Place("CPU", "LOCAL"),
    "fs": Place("STORAGE", "LOCAL", "fs"),
    "shared": Place("SHARED_STORAGE", "REMOTE", "shared"),
}
TOKENS = list(range(1000, 1000 + 4 * BLOCK))
BRANCH = [*TOKENS[: 3 * BLOCK], *range(5000, 5000 + BLOCK)]
WAYS = [(encoding, hashes) for encoding in ("map", "array") for hashes in ("int", "bytes")]


def chunks(tokens, *, group=0, tenant="", salt="", adapter=None):
    """The chunks of a prompt, named as vLLM names blocks: a chain of SHA-256."""
    above, hashes = hashlib.sha256(repr((salt, adapter)).encode()).digest(), []
    for start in range(0, len(tokens), BLOCK):
        above = hashlib.sha256(above + repr(tokens[start : start + BLOCK]).encode()).digest()
        hashes.append(above)
    found = []
    for first in range(0, len(hashes), PER_CHUNK):
        some = hashes[first : first + PER_CHUNK]
        extra = [(adapter,) if adapter else () for _ in some]
        extra[0] += (salt,) if salt and not first else ()
        found.append(
            ChunkBlocks(
                make_offload_key(some[-1], group, tenant),
                some,
                hashes[first - 1] if first else None,
                tokens[first * BLOCK : (first + PER_CHUNK) * BLOCK],
                adapter,
                [each or None for each in extra] if salt or adapter else None,
            )
        )
    return found


def scene(encoding, hashes):
    """Yield what happens, and the batch that is published of it."""
    wire = Wire(hashes, encoding)
    table = ChunkTable(wire, GROUPS, PLACES, tokens=True)
    prompt, branch, red = chunks(TOKENS), chunks(BRANCH)[1:], chunks(TOKENS, tenant="red")
    salted, adapted = chunks(TOKENS, salt="pepper"), chunks(TOKENS, adapter="alice")
    bare = [chunk._replace(key=make_offload_key(chunk.hashes[-1], 0, "green")) for chunk in prompt]
    table.describe([*prompt, *branch, *red, *salted, *adapted])
    steps = [
        ("a prompt is stored", prompt, False, ""),
        ("another one, three of its four blocks the same", branch, False, ""),
        ("the first one by a tenant", red, False, ""),
        ("a tier has stored it", prompt, False, "fs"),
        ("a tier with a medium of its own, too", prompt, False, "shared"),
        ("the first tier had it already", prompt, False, "fs"),
        ("chunks of a sliding window", chunks(TOKENS, group=1), False, ""),
        ("chunks of a state space", chunks(TOKENS, group=2), False, ""),
        ("a prompt with a salt", salted, False, ""),
        ("a prompt for an adapter", adapted, False, ""),
        ("the first one is evicted", prompt, True, ""),
        ("the tenant's is evicted", red, True, ""),
        ("the other one is evicted", branch, True, ""),
        ("chunks without a description", bare, False, ""),
        ("the sliding window's are evicted", chunks(TOKENS, group=1), True, ""),
        ("a load finds nothing in the first tier", prompt, True, "fs"),
    ]
    for number, (what, some, removed, tier) in enumerate(steps):
        events = table.events(OffloadEvent([chunk.key for chunk in some], removed, tier))
        yield what, wire.encode(1.5 + number, list(events))
    table.clear()
    yield "all is cleared", wire.encode(99.5, [wire.cleared()])


QUERIES = {
    "the prompt": {"tokens": TOKENS},
    "the other one": {"tokens": BRANCH},
    "with the salt": {"tokens": TOKENS, "salt": "pepper"},
    "for the adapter": {"tokens": TOKENS, "model": "alice"},
}


@pytest.mark.parametrize(("encoding", "hashes"), WAYS)
def test_batches_have_the_bytes_that_llm_ds_decoder_took(encoding, hashes):
    assert [(what, batch.hex()) for what, batch in scene(encoding, hashes)] == [
        (step["what"], step["batches"][f"{encoding}, {hashes}"]) for step in GOLDEN["steps"]
    ]


@pytest.mark.parametrize(("encoding", "hashes"), WAYS)
def test_the_index_of_these_tests_finds_what_llm_ds_found(encoding, hashes):
    index = LlmDIndex(BLOCK)
    for step in GOLDEN["steps"]:
        index.take(bytes.fromhex(step["batches"][f"{encoding}, {hashes}"]))
        assert {name: index.find(**query) for name, query in QUERIES.items()} == step["found"], step["what"]


PROMPTS = {
    (name, tenant): chunks([*TOKENS[: shared * BLOCK], *range(number, number + (6 - shared) * BLOCK)], tenant=tenant)
    for name, shared, number in [("a", 0, 2000), ("b", 1, 3000), ("c", 3, 4000), ("d", 4, 5000)]
    for tenant in ("", "red")
}
STEPS = st.lists(st.tuples(st.sampled_from(sorted(PROMPTS)), st.sampled_from(["", "fs", "shared"]), st.integers(0, 3)))


@given(STEPS)
def test_a_router_that_counts_stores_and_removals_finds_what_is_there_and_nothing_else(steps):
    """Each step leaves so many of a prompt's chunks in a place; a tier says again what it has already."""
    wire = Wire("int", "map")
    table, index, there = ChunkTable(wire, GROUPS, PLACES, tokens=True), LlmDIndex(BLOCK), set()

    def publish(some, removed, tier):
        table.describe(some)
        changes = table.events(OffloadEvent([chunk.key for chunk in some], removed, tier))
        index.take(wire.encode(1.5, list(changes)))

    for prompt, tier, length in steps:
        of_prompt = {chunk.key: (tier, chunk.key) for chunk in PROMPTS[prompt]}
        kept, gone = PROMPTS[prompt][:length], PROMPTS[prompt][length:]
        new = [chunk for chunk in kept if tier or of_prompt[chunk.key] not in there]
        publish(new, False, tier)
        publish([chunk for chunk in gone if of_prompt[chunk.key] in there], True, tier)
        there = (there | {of_prompt[chunk.key] for chunk in kept}) - {of_prompt[chunk.key] for chunk in gone}
    for some in PROMPTS.values():
        tokens = [token for chunk in some for token in chunk.tokens]
        hashes = [each for chunk in some for each in chunk.hashes]
        places = {name: f"pod@{place.medium.lower()}[group=0]" for name, place in PLACES.items()}
        has = {
            (tier, each)
            for known in PROMPTS.values()
            for chunk in known
            for tier in PLACES
            if (tier, chunk.key) in there
            for each in chunk.hashes
        }
        expected = [sorted(places[tier] for tier in PLACES if (tier, each) in has) for each in hashes]
        assert index.find(tokens) == expected
