"""Pages of the real host pools: every byte comes back, in every layout, and only under the same identity."""

import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvtiers.api import ConfigError
from kvtiers_sglang.backend import forget_weights

from .parts import MHA_LAYOUTS, MLA_LAYOUTS, mha_pool, mla_pool


@dataclass
class Other:
    """A server that differs in one thing."""

    name: str
    pool: Any = None
    storage: Any = None
    arguments: Any = None


POOLS = [*[(mha_pool, layout) for layout in MHA_LAYOUTS], *[(mla_pool, layout) for layout in MLA_LAYOUTS]]


@pytest.mark.parametrize(("make", "layout"), POOLS, ids=lambda it: getattr(it, "__name__", it))
def test_every_byte_of_a_page_comes_back_in_every_layout(serve, make, layout):
    first = serve(make(layout), is_mla_model=make is mla_pool)
    keys, content = first.store(pages=5)
    first.close()
    second = serve(make(layout), is_mla_model=make is mla_pool)
    assert second.backend.batch_exists([*keys, "0" * 64]) == 5
    assert second.load(keys) == ([True] * 5, content)


def test_a_page_that_is_not_there_ends_the_prefix_and_changes_nothing(serve):
    server = serve()
    keys, content = server.store(pages=4)
    absent = server.keys(1, seed=7)
    slots = server.take(3)
    before = server.fill(slots, 5)
    found = server.backend.batch_get_v1([keys[0], *absent, keys[1]], slots)
    assert found == [True, False, True]
    page = len(before) // 3
    after = server.content(slots)
    assert after[page : 2 * page] == before[page : 2 * page]
    assert after[:page] == content[:page]
    assert server.backend.batch_exists([*keys[:2], *absent, keys[2]]) == 2
    assert server.backend.exists(keys[3])
    assert not server.backend.exists(absent[0])


def test_pages_of_one_prompt_are_chained_so_that_another_beginning_shares_nothing(serve):
    server = serve()
    keys, _ = server.store(pages=2, seed=1)
    assert server.backend.batch_exists(server.keys(2, seed=2)) == 0
    assert server.backend.batch_exists(keys) == 2


def test_a_batch_of_128_pages_with_fewer_bounce_rows_than_pages(serve):
    pool = mha_pool(page=1)
    server = serve(pool)
    keys, content = server.store(pages=128)
    assert server.load(keys) == ([True] * 128, content)


OTHERS = [
    Other("dtype", pool=lambda: mha_pool(dtype=torch.float16)),
    Other("layout", pool=lambda: mha_pool("page_first_direct")),
    Other("heads", pool=lambda: mha_pool(heads=4)),
    Other("layers", pool=lambda: mha_pool(layers=2)),
    Other("page size, with the same bytes", pool=lambda: mha_pool(page=32, layers=3)),
    Other("page size against heads", pool=lambda: mha_pool(page=8, heads=4)),
    Other("revision", arguments={"revision": "1" * 40}),
    Other("quantization", arguments={"quantization": "fp8"}),
    Other("kv-cache-dtype", arguments={"kv_cache_dtype": "fp8_e4m3"}),
    Other("scales", arguments={"quantization_param_path": "/scales.json"}),
    Other("overrides", arguments={"json_model_override_args": '{"rope_theta": 1}'}),
    Other("speculation", arguments={"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "test/model"}),
    Other("model", storage={"model_name": "another"}),
    Other("TP size", storage={"tp_size": 2}),
    Other("TP rank", storage={"tp_size": 2, "tp_rank": 1}),
    Other("PP rank", storage={"pp_size": 2, "pp_rank": 1}),
    Other("CP rank", storage={"attn_cp_size": 2, "attn_cp_rank": 1}),
]


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other.name)
def test_a_server_that_differs_in_what_decides_the_bytes_finds_nothing(serve, arguments, other):
    first = serve()
    keys, _ = first.store(pages=2)
    for name, value in (other.arguments or {}).items():
        setattr(arguments, name, value)
    second = serve(other.pool() if other.pool else None, **(other.storage or {}))
    assert second.backend.batch_exists(keys) == 0
    slots = second.take(2)
    before = second.fill(slots, 3)
    assert second.backend.batch_get_v1(keys, slots) == [False, False]
    assert second.content(slots) == before
    own, content = second.store(pages=2)
    assert second.load(own) == ([True, True], content)
    assert first.load(keys)[0] == [True, True]


@pytest.mark.parametrize(("rank", "size"), [(1, 2), (3, 4), (0, 1)])
def test_what_is_replicated_has_one_writer_and_readers_on_every_rank_of_any_number(serve, rank, size):
    writer = serve(mla_pool(), is_mla_model=True, tp_size=2)
    keys, content = writer.store(pages=3)
    reader = serve(mla_pool(), is_mla_model=True, tp_rank=rank, tp_size=size)
    assert reader.load(keys) == ([True] * 3, content)


def test_pages_of_other_weights_are_neither_stored_nor_found(serve):
    server = serve()
    keys, _ = server.store(pages=2)
    forget_weights("update_weights_from_disk")
    assert server.backend.batch_exists(keys) == 0
    assert server.load(keys)[0] == [False, False]
    slots = server.take(2)
    assert server.backend.batch_set_v1(server.keys(2, seed=3), slots) == [False, False]
    fresh = serve()
    assert fresh.backend.batch_exists(server.keys(2, seed=3)) == 0
    assert fresh.backend.batch_exists(keys) == 2


def test_many_threads_back_up_and_prefetch_and_every_byte_is_right(serve):
    server = serve()
    lock, failures = threading.Lock(), []

    def work(seed):
        for turn in range(3):
            with lock:
                keys, slots = server.keys(2, seed=10 * seed + turn), server.take(2)
                back = server.take(2)
            content = server.fill(slots, 10 * seed + turn)
            stored = server.backend.batch_set_v1(keys, slots)
            if stored != [True, True] or server.backend.batch_get_v1(keys, back) != [True, True]:
                failures.append((seed, turn, stored))
            elif server.content(back) != content:
                failures.append((seed, turn, "other bytes"))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []


# -- what cannot be established is refused


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"arguments": {"revision": None}}, "its commit is not in the cache of the hub"),
        ({"arguments": {"load_format": "dummy"}}, "load format 'dummy'"),
        ({"arguments": {"model_path": None}}, "the weights are not; set 'weights'"),
        ({"arguments": {"model_path": "/tmp"}}, "cannot be identified"),
        ({"pool": lambda: mha_pool(dtype=torch.uint8)}, "--kv-cache-dtype does not say of what"),
        ({"storage": {"model_name": None}}, "names no model"),
        ({"storage": {"tp_lcm_size": 4, "should_split_heads": True}}, "'tp_lcm_size' has no effect"),
    ],
)
def test_what_cannot_be_established_is_refused_in_one_line(serve, arguments, changed, said):
    for name, value in changed.get("arguments", {}).items():
        setattr(arguments, name, value)
    with pytest.raises(ConfigError, match=said) as error:
        serve(changed["pool"]() if "pool" in changed else None, **changed.get("storage", {}))
    assert len(str(error.value).splitlines()) == 1


def test_a_folder_with_weights_is_their_digest_and_other_weights_are_another(serve, arguments, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.bin").write_bytes(bytes(10_000))
    arguments.model_path, arguments.revision = str(folder), None
    keys, content = serve().store(pages=1)
    assert serve().load(keys) == ([True], content)
    (folder / "model.bin").write_bytes(bytes(9_999) + b"x")
    assert serve().backend.batch_exists(keys) == 0
