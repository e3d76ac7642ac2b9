"""The whole stack's layout, from vLLM's config alone: what the scheduler and each worker derive is the same."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from kvtiers.api import ConfigError, StartError
from kvtiers.layout.cache_layout import ModelIdentity
from kvtiers_vllm.identity import Engine
from kvtiers_vllm.releases import require_whole_stack
from kvtiers_vllm.stack.layout import (
    auto_blocks_per_chunk,
    cache_layout,
    checkpoints_in_words,
    group_keys,
    layer_tensors,
    rank_map,
)
from kvtiers_vllm.stack.options import load_stack_config

KV_HEADS = 2
MODEL = ModelIdentity("model", weights="v1")


class FullAttentionSpec(SimpleNamespace):
    pass


class SlidingWindowSpec(SimpleNamespace):
    pass


@dataclass
class MambaSpec:
    state_bytes: int
    page_size_padded: int | None
    mamba_cache_mode: str = "align"

    @property
    def page_size_bytes(self):
        return self.page_size_padded or self.state_bytes


FULL = FullAttentionSpec(unpadded_page_size_bytes=2048, sliding_window=None)
WINDOW = SlidingWindowSpec(unpadded_page_size_bytes=1024, sliding_window=96)
STATES, STATES_EVERYWHERE = MambaSpec(1000, 1024), MambaSpec(1000, 1024, "all")


def offloading(*groups, blocks_per_chunk=1, world_size=1, canonical=False, certified=True):
    """``groups``: vLLM's number, tokens in a block, and layers of each."""
    return SimpleNamespace(
        groups=[
            SimpleNamespace(group_id=number, tokens_per_block=tokens, layer_names=tuple(layers))
            for number, tokens, layers in groups
        ],
        cache=SimpleNamespace(blocks_per_chunk=blocks_per_chunk, tokens_per_hash=16),
        parallel=SimpleNamespace(world_size=world_size, tp_size=world_size, is_parallelism_agnostic=certified),
        canonical_layout=canonical,
    )


def cache_config(*specs):
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])
    model_config = SimpleNamespace(use_mla=False, get_total_num_kv_heads=lambda: KV_HEADS)
    return Engine(SimpleNamespace(model_config=model_config), groups)


def test_groups_are_those_that_vllm_offloads_and_their_tensors_are_the_layers():
    config = offloading((0, 32, ["a", "b"]), (2, 16, ["c"]), blocks_per_chunk=4, world_size=2)
    layout = cache_layout(MODEL, config, cache_config(FULL, "not offloaded", WINDOW))
    assert [(group.tokens_per_block, group.kind, group.window) for group in layout.groups] == [
        (32, "full_attention", None),
        (16, "sliding_window", 96),
    ]
    assert [(tensor.name, tensor.group, tensor.page_bytes) for tensor in layout.tensors] == [
        ("a", 0, 2048),
        ("b", 0, 2048),
        ("c", 1, 1024),
    ]
    assert layout.payload_bytes(0) == 2 * 4 * 2 * 2048
    keys = group_keys(layout, config)
    assert {number: (each.index, each.hashes_per_chunk, each.whole_prefix) for number, each in keys.items()} == {
        0: (0, 8, True),
        2: (1, 4, False),
    }


def test_padding_is_no_part_of_a_page():
    mamba = MambaSpec(state_bytes=700, page_size_padded=4096)
    layout = cache_layout(MODEL, offloading((0, 64, ["m"])), cache_config(mamba))
    assert layout.tensors[0].page_bytes == 700
    assert layout.groups[0].kind == "state_space"


def test_layers_of_one_group_may_differ():
    each = FullAttentionSpec(kv_cache_specs={"a": FULL, "b": FullAttentionSpec(unpadded_page_size_bytes=512)})
    layout = cache_layout(MODEL, offloading((0, 32, ["a", "b"])), cache_config(each))
    assert [tensor.page_bytes for tensor in layout.tensors] == [2048, 512]


def caches(*refs, page=2048):
    return SimpleNamespace(
        tensors=[SimpleNamespace(tensor=f"memory {number}") for number in range(3)],
        group_data_refs=[[SimpleNamespace(tensor_idx=number, page_size_bytes=page) for number in refs]],
    )


def test_each_layer_finds_its_memory_also_where_groups_share_it():
    layout = cache_layout(MODEL, offloading((0, 32, ["a", "b"])), cache_config(FULL))
    assert layer_tensors(layout, caches(2, 0)) == ["memory 2", "memory 0"]


@pytest.mark.parametrize(
    ("found", "expected"), [(caches(0), "2 layers in 1 pages"), (caches(0, 1, page=1000), "1000 bytes in KV memory")]
)
def test_kv_memory_of_another_shape_is_refused_by_name(found, expected):
    layout = cache_layout(MODEL, offloading((0, 32, ["a", "b"])), cache_config(FULL))
    with pytest.raises(StartError, match=expected):
        layer_tensors(layout, found)


def canonical_caches(*pages, agnostic=True):
    """As vLLM's: this rank is the second of two, each with half of the heads."""
    runs = [SimpleNamespace(local_offset=0, canonical_offset=page, fragment_size=page, num_fragments=1,
                            local_stride=page, canonical_stride=page) for page in pages]  # fmt: skip
    mappings = [
        SimpleNamespace(canonical_page_size_bytes=2 * page, parallelism_agnostic=agnostic, runs=[run],
                        num_writers=1, writer_index=0)
        for page, run in zip(pages, runs, strict=True)
    ]  # fmt: skip
    return SimpleNamespace(group_data_refs=[[SimpleNamespace(mapping=mapping)] for mapping in mappings])


@pytest.mark.parametrize(("ranks", "canonical_page"), [(1, 2048), (2, 4096), (4, 4096)])
def test_a_canonical_page_holds_each_head_once(ranks, canonical_page):
    config = offloading((0, 32, ["a"]), world_size=ranks, canonical=True)
    layout = cache_layout(MODEL, config, cache_config(FULL))
    assert layout.row_layout == "canonical"
    assert layout.tensors[0].canonical_page_bytes == canonical_page


def test_where_a_ranks_bytes_lie_is_what_vllm_says():
    config = offloading((0, 32, ["a"]), (1, 32, ["b"]), world_size=2, canonical=True)
    layout = cache_layout(MODEL, config, cache_config(FULL, WINDOW))
    found = rank_map(layout, canonical_caches(2048, 1024))
    assert [(run.tensor, run.canonical_offset, run.nbytes) for run in found.runs] == [(0, 2048, 2048), (1, 1024, 1024)]
    assert rank_map(cache_layout(MODEL, offloading((0, 32, ["a"])), cache_config(FULL)), None) is None


def test_canonical_rows_that_vllm_does_not_certify_are_refused():
    with pytest.raises(StartError, match="canonical_layout: vLLM does not certify it"):
        cache_layout(MODEL, offloading((0, 32, ["a"]), canonical=True, certified=False), cache_config(FULL))
    layout = cache_layout(MODEL, offloading((0, 32, ["a"]), world_size=2, canonical=True), cache_config(FULL))
    with pytest.raises(StartError, match="does not certify the pages of a"):
        rank_map(layout, canonical_caches(2048, agnostic=False))
    with pytest.raises(StartError, match="canonical bytes are 2048, expected 4096"):
        rank_map(layout, canonical_caches(1024))


@pytest.mark.parametrize("version", ["0.28.0", "0.29.0"])
def test_a_release_that_it_does_not_run_on_is_refused_with_those_it_does(version):
    with pytest.raises(StartError, match=r"runs on vLLM 0\.30, 0\.31, 0\.32 and 0\.33, not on " + version):
        require_whole_stack(version)


def test_an_unknown_release_is_refused():
    with pytest.raises(StartError, match="does not support vLLM"):
        require_whole_stack("0.99.0")


@pytest.mark.parametrize("version", ["0.30.0", "0.31.0", "0.32.0+cpu", "0.33.0"])
def test_the_releases_that_the_tests_run_are_taken(version):
    require_whole_stack(version)


DOCUMENT = {"version": 1, "primary": {"capacity": "64MiB"}}


def test_the_config_names_the_weights_and_nothing_else_of_the_model():
    config, weights = load_stack_config({"kvtiers_config": DOCUMENT | {"model": {"name": "m", "revision": "v2"}}})
    assert (config.model, weights) == (None, "v2")
    assert load_stack_config({"kvtiers_config": DOCUMENT})[1] is None
    with pytest.raises(ConfigError, match=r"model\.kv_dtype: the engine sets it"):
        load_stack_config({"kvtiers_config": DOCUMENT | {"model": {"name": "m", "kv_dtype": "float16"}}})


def test_a_config_that_is_missing_is_asked_for():
    with pytest.raises(ConfigError, match="kvtiers_config is missing"):
        load_stack_config({})


def groups_of(*groups):
    """``groups``: tokens in a block, bytes of a page, and how many layers; further fields of the spec."""
    return SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(
                kv_cache_spec=SimpleNamespace(block_size=tokens, unpadded_page_size_bytes=page, **more),
                layer_names=[f"{number}.{layer}" for layer in range(layers)],
            )
            for number, (tokens, page, layers, more) in enumerate(groups)
        ]
    )


@pytest.mark.parametrize(
    ("groups", "world_size", "interval", "blocks"),
    [
        ([(16, 4096, 36, {})], 1, None, 4),
        ([(16, 4096, 6, {})] * 6, 2, 0, 4),
        ([(32, 4096, 36, {})], 1, 0, 2),
        ([(24, 4096, 36, {})], 1, 0, 3),
        ([(64, 4096, 36, {})], 1, 0, 1),
        ([(16, 4096, 36, {}), (256, 4096, 36, {})], 1, 0, 1),
        ([(16, 65536, 80, {})], 1, 0, 3),
        ([(16, 65536, 80, {})], 4, 0, 1),
        ([(16, 4096, 6, {})] * 6, 1, 8192, 4),
        ([(16, 4096, 6, {})] * 6, 1, 32, 2),
        ([(16, 4096, 6, {}), (16, 4096, 6, {"mamba_cache_mode": "align"})], 1, 0, 1),
        ([], 1, None, 1),
    ],
)
def test_a_chunk_has_64_tokens_in_16_mib_unless_the_config_says_otherwise(groups, world_size, interval, blocks):
    assert auto_blocks_per_chunk(groups_of(*groups), world_size, interval) == blocks


AT_THE_END = "at a prompt's end, and where vLLM has seen prompts part"


@pytest.mark.parametrize(
    ("interval", "specs", "words"),
    [
        (0, [FULL], ""),
        (0, [FULL, WINDOW], "every 8192 tokens, and before a prompt's end"),
        (512, [FULL, WINDOW], "every 512 tokens, and before a prompt's end"),
        (None, [FULL, WINDOW], "at the end of each chunk"),
        (0, [FULL, STATES], AT_THE_END),
        (0, [FULL, WINDOW, STATES], AT_THE_END),
        (512, [FULL, STATES], f"{AT_THE_END}, and at multiples of 512 tokens at which a step's part of it ends"),
        (None, [FULL, STATES], "where a step's part of a prompt ends"),
        (0, [FULL, STATES_EVERYWHERE], "every 8192 tokens, and before a prompt's end"),
    ],
)
def test_the_start_line_says_where_a_hybrid_models_checkpoints_are(interval, specs, words):
    config = offloading(*((number, 64, [str(number)]) for number in range(len(specs))))
    engine = cache_config(*specs)
    engine.vllm_config.cache_config = SimpleNamespace(prefix_cache_retention_interval=interval)
    assert checkpoints_in_words(cache_layout(MODEL, config, engine), config, engine) == words
