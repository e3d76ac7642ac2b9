import dataclasses
import hashlib
import itertools
import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.api import ConfigError
from kvtiers.layout.cache_layout import FINGERPRINT_FORMAT, CacheLayout, KVGroup, KVTensor, ModelIdentity

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "fingerprint-1.json").read_text(encoding="utf-8"))


def layout(**changes):
    options = {
        "model": ModelIdentity("m", weights="abc"),
        "groups": (KVGroup("full", 16), KVGroup("window", 32, "sliding_window", 4096)),
        "tensors": (KVTensor("a", 0, 1000, 2000), KVTensor("b", 1, 3000, 6000), KVTensor("c", 0, 5000, 10000)),
        "blocks_per_chunk": 2,
        "world_size": 2,
    }
    return CacheLayout(**options | changes)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["title"])
def test_fingerprints_of_this_format_never_change(case):
    assert FINGERPRINT_FORMAT == 1, "another format needs golden files of its own, beside these"
    rebuilt = CacheLayout.from_json(json.dumps(case["layout"]))
    assert rebuilt.fingerprint_json() == case["fingerprint_json"]
    assert rebuilt.fingerprint == case["fingerprint"] == hashlib.sha256(case["fingerprint_json"].encode()).hexdigest()
    assert rebuilt.row_stride == case["row_stride"]


def test_a_prompts_prefix_is_in_the_first_group_of_full_attention():
    full, window = layout().groups
    for groups, first in (((full, window), 0), ((window, full), 1), ((window, full, full), 1), ((window,), 0)):
        tensors = tuple(KVTensor(f"t{group}", group, 64) for group in range(len(groups)))
        assert layout(groups=groups, tensors=tensors).prefix_group == first


def test_a_direct_row_holds_the_ranks_one_after_the_other_and_their_tensors_in_order():
    direct = layout()
    # Group 0, two blocks a chunk: a (1000) and c (5000) for rank 0, then for rank 1.
    assert [direct.tensor_offset(t, rank) for rank in (0, 1) for t in (0, 2)] == [0, 2000, 12000, 14000]
    assert [direct.cell_offset(0, rank) for rank in (0, 1)] == [0, 12000]
    # Group 1 has a row of its own: it starts at byte 0, whatever group 0 takes.
    assert [direct.tensor_offset(1, rank) for rank in (0, 1)] == [0, 6000]
    assert [direct.payload_bytes(g) for g in (0, 1)] == [24000, 12000]
    assert [direct.value_bytes(g) for g in (0, 1)] == [24576, 12288]
    assert direct.row_stride == 24576
    assert direct.tokens_per_chunk(1) == 64


def test_a_replicated_row_holds_one_ranks_bytes():
    replicated = layout(row_layout="replicated")
    assert [replicated.payload_bytes(g) for g in (0, 1)] == [12000, 6000]
    assert replicated.cell_offset(0, 1) == 0
    assert replicated.tensor_offset(2, 1) == replicated.tensor_offset(2, 0) == 2000


def test_a_canonical_row_holds_canonical_pages():
    canonical = layout(row_layout="canonical")
    assert [canonical.payload_bytes(g) for g in (0, 1)] == [24000, 12000]
    assert canonical.tensor_offset(2, 1) == 4000
    assert canonical.page_in_row(2, 1) == 10000


def test_ranks_may_hold_other_tensors():
    """As under pipeline parallelism: a tensor that a rank does not hold takes no room in its cell."""
    split = layout(groups=(KVGroup("full", 16),), tensors=(KVTensor("a", 0, (1000, 0)), KVTensor("b", 0, (0, 3000))))
    assert [split.cell_bytes(0, rank) for rank in (0, 1)] == [2000, 6000]
    assert split.tensor_offset(1, 1) == 2000
    assert split.payload_bytes(0) == 8000


layouts = st.builds(
    lambda pages, world, blocks, kind: CacheLayout(
        ModelIdentity("m"),
        tuple(KVGroup(f"g{g}", 16) for g in range(len(pages))),
        tuple(
            KVTensor(f"t{g}.{i}", g, size, 2 * size) for g, sizes in enumerate(pages) for i, size in enumerate(sizes)
        ),
        blocks,
        world,
        kind,
    ),
    st.lists(st.lists(st.integers(1, 9000), min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(1, 8),
    st.sampled_from(["direct", "replicated", "canonical"]),
)


@settings(deadline=None)
@given(layouts)
def test_every_page_has_its_own_bytes_in_the_row_and_ends_before_the_seal(some):
    for group in range(len(some.groups)):
        taken = []
        for rank in range(some.world_size if some.row_layout == "direct" else 1):
            for index, tensor in enumerate(some.tensors):
                if tensor.group == group:
                    start = some.tensor_offset(index, rank)
                    taken.append((start, start + some.blocks_per_chunk * some.page_in_row(index, rank)))
        taken.sort()
        assert taken[0][0] == 0
        assert all(end == start for (_, end), (start, _) in itertools.pairwise(taken))
        assert taken[-1][1] == some.payload_bytes(group)
        assert some.value_bytes(group) % 4096 == 0
        assert some.payload_bytes(group) + 64 <= some.value_bytes(group) < some.payload_bytes(group) + 64 + 4096
        assert some.value_bytes(group) <= some.row_stride


@settings(deadline=None)
@given(layouts)
def test_a_layout_survives_json(some):
    again = CacheLayout.from_json(some.to_json())
    assert again == some
    assert hash(again) == hash(some)
    assert again.differences(some) == []


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ["model", "groups", "tensors", "blocks_per_chunk", "world_size", "row_layout"]
TENSOR_FIELDS = ["name", "group", "page_bytes", "canonical_page_bytes"]


@settings(deadline=None)
@given(layouts, junk, st.sampled_from(FIELDS), st.sampled_from(TENSOR_FIELDS))
def test_whatever_a_peer_sends_as_a_layout_is_compared_at_once_and_never_made(some, junk, name, of_tensor):
    document = json.loads(some.to_json())
    documents = [junk, document | {name: junk}, document | {"tensors": [document["tensors"][0] | {of_tensor: junk}]}]
    begin = time.thread_time()
    for peers in documents:
        differs = some.differences_in(json.loads(json.dumps(peers)))
        assert all(len(line) < 600 for line in differs)
    assert time.thread_time() - begin < 1.0
    assert some.differences_in(document | {"world_size": 10**9}) == [
        f"world_size: {some.world_size} here, 1000000000 there"
    ]
    assert some.differences_in(document) == []


CHANGES = [
    {"model": ModelIdentity("m", weights="other")},
    *[
        {"model": dataclasses.replace(ModelIdentity("m", weights="abc"), **{name: value})}
        for name, value in {
            "name": "other", "kv_dtype": "fp8", "kv_scales": "x", "rope": "yarn", "quantization": "awq",
            "kv_layout": "HND", "hash_algorithm": "xxh3", "hash_seed": "1", "hash_bytes": 16,
            "engine": "sglang",
        }.items()
    ],
    {"groups": (KVGroup("full", 32), KVGroup("window", 32, "sliding_window", 4096))},
    {"groups": (KVGroup("full", 16), KVGroup("window", 32, "sliding_window", 2048))},
    {"groups": (KVGroup("full", 16), KVGroup("window", 32, "state_space"))},
    {"tensors": (KVTensor("c", 0, 5000, 10000), KVTensor("b", 1, 3000, 6000), KVTensor("a", 0, 1000, 2000))},
    {"tensors": (KVTensor("a", 0, 1000, 2000), KVTensor("b", 1, 3000, 6000), KVTensor("x", 0, 5000, 10000))},
    {"tensors": (KVTensor("a", 0, 1000, 2000), KVTensor("b", 1, 3000, 6000), KVTensor("c", 0, 5001, 10000))},
    {"tensors": (KVTensor("a", 0, 1000, 2000), KVTensor("b", 1, 3000, 6000), KVTensor("c", 1, 5000, 10000))},
    {"blocks_per_chunk": 4},
    {"world_size": 1},
    {"row_layout": "replicated"},
    {"row_layout": "canonical"},
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=[str(i) for i in range(len(CHANGES))])
def test_whatever_decides_what_the_bytes_mean_changes_the_fingerprint_and_is_named(change):
    assert layout(**change).fingerprint != layout().fingerprint
    differences = layout().differences(layout(**change))
    assert differences
    assert all(" here, " in line for line in differences)
    assert layout(**change) != layout()


@pytest.mark.parametrize("row_layout", ["replicated", "canonical"])
def test_a_row_that_holds_no_ranks_is_shared_across_world_sizes(row_layout):
    assert layout(row_layout=row_layout, world_size=4).fingerprint == layout(row_layout=row_layout).fingerprint


def test_a_canonical_row_does_not_depend_on_a_ranks_own_page_sizes():
    other = tuple(dataclasses.replace(tensor, page_bytes=(7, 9)) for tensor in layout().tensors)
    assert layout(row_layout="canonical", tensors=other).fingerprint == layout(row_layout="canonical").fingerprint


def test_group_names_are_for_people_only():
    renamed = tuple(dataclasses.replace(group, name=f"new-{group.name}") for group in layout().groups)
    assert layout(groups=renamed).fingerprint == layout().fingerprint


def test_one_size_for_all_ranks_may_be_written_either_way():
    spelled = tuple(dataclasses.replace(t, page_bytes=(t.page_bytes, t.page_bytes)) for t in layout().tensors)
    assert layout(tensors=spelled).fingerprint == layout().fingerprint
    assert layout().differences(layout(tensors=spelled)) == []


def test_a_difference_names_the_field_and_both_values():
    assert layout().differences(layout(blocks_per_chunk=4)) == ["blocks_per_chunk: 2 here, 4 there"]
    assert layout().differences(layout(model=ModelIdentity("m", weights="x"))) == [
        "model.weights: 'abc' here, 'x' there"
    ]
    fewer = layout(tensors=layout().tensors[:2])
    assert layout().differences(fewer) == ["tensors: 3 entries here, 2 there"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"groups": ()}, "no KV group"),
        ({"blocks_per_chunk": 0}, "blocks_per_chunk is 0, expected 1 to 64"),
        ({"blocks_per_chunk": 65}, "blocks_per_chunk is 65, expected 1 to 64"),
        ({"world_size": 0}, "world_size is 0, expected 1 to 65536"),
        ({"world_size": 10**9}, "world_size is 1000000000, expected 1 to 65536"),
        ({"row_layout": "diagonal"}, "row_layout is 'diagonal', expected one of direct, replicated, canonical"),
        ({"groups": (KVGroup("full", 0), KVGroup("w", 16))}, "group 'full': tokens_per_block is 0"),
        ({"groups": (KVGroup("full", 16), KVGroup("w", 16), KVGroup("idle", 16))}, "group 'idle' has no tensor"),
        ({"groups": (KVGroup("full", 16), KVGroup("w", 16, "sliding_window"))}, "group 'w': window is None, expected"),
        ({"groups": (KVGroup("full", 16), KVGroup("w", 16, window=9))}, "group 'w': window is 9, expected none"),
        ({"tensors": (KVTensor("a", 0, 8), KVTensor("b", 2, 8), KVTensor("c", 1, 8))}, "tensor 'b': group 2 does not"),
        ({"tensors": (KVTensor("a", 0, 8), KVTensor("a", 1, 8))}, "tensor 'a' is there 2 times"),
        ({"tensors": (KVTensor("a", 0, 0), KVTensor("b", 1, 8))}, "tensor 'a': page_bytes is 0, expected a positive"),
        ({"tensors": (KVTensor("a", 0, (8, -1)), KVTensor("b", 1, 8))}, "tensor 'a': page_bytes is (8, -1)"),
        ({"tensors": (KVTensor("a", 0, (8,)), KVTensor("b", 1, 8))}, "tensor 'a': page_bytes has 1 entries, expected"),
        (
            {"tensors": (KVTensor("a", 0, (8, 9)), KVTensor("b", 1, 8)), "row_layout": "replicated"},
            "tensor 'a': page_bytes (8, 9) differ",
        ),
        (
            {"tensors": (KVTensor("a", 0, 8), KVTensor("b", 1, 8)), "row_layout": "canonical"},
            "tensor 'a': canonical_page_bytes is missing",
        ),
    ],
)
def test_a_layout_that_makes_no_sense_is_one_clear_line(change, problem):
    with pytest.raises(ConfigError) as error:
        layout(**change)
    assert any(line.startswith(f"cache layout: {problem}") for line in error.value.problems)
