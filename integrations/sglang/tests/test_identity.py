"""Whose pages are whose: a server that differs in what decides the bytes finds nothing; what is unknown is refused."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs

from kvtiers.api import ConfigError
from kvtiers_sglang import identity, weight_updates

from .parts import mamba_pool, mha_pool, mla_pool


@dataclass
class Other:
    """A server that differs in one thing; ``both``: arguments, and ``options`` of ours, that the first one has too."""

    name: str
    pool: Any = None
    storage: Any = field(default_factory=dict)
    arguments: Any = field(default_factory=dict)
    both: Any = field(default_factory=dict)
    options: Any = field(default_factory=dict)


KNOWN = {"weights": "w" * 8}
DRAFT = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "test/model"}
OTHERS = [
    Other("dtype", pool=lambda: mha_pool(dtype=torch.float16)),
    Other("layout", pool=lambda: mha_pool("page_first_direct")),
    Other("layout on the device", pool=lambda: mha_pool(on_device=KVBufferLayout.HND)),
    Other("heads", pool=lambda: mha_pool(heads=4)),
    Other("layers", pool=lambda: mha_pool(layers=2)),
    Other("page size, with the same bytes", pool=lambda: mha_pool(page=32, layers=3)),
    Other("page size against heads", pool=lambda: mha_pool(page=8, heads=4)),
    Other("revision", arguments={"revision": "1" * 40}),
    Other("quantization", arguments={"quantization": "fp8"}),
    Other("kv-cache-dtype", arguments={"kv_cache_dtype": "fp8_e4m3"}),
    Other("overrides", arguments={"json_model_override_args": '{"rope_theta": 1}'}),
    Other("model", storage={"model_name": "another"}),
    Other("TP size", storage={"tp_size": 2}),
    Other("TP rank", storage={"tp_size": 2, "tp_rank": 1}),
    Other("PP rank", storage={"pp_size": 2, "pp_rank": 1}),
    Other("CP rank", storage={"attn_cp_size": 2, "attn_cp_rank": 1}),
    # how the model is computed
    Other("dtype of the model", arguments={"dtype": "float16"}),
    Other("implementation", arguments={"model_impl": "transformers"}),
    Other("loader's config", arguments={"model_loader_extra_config": '{"x": 1}'}),
    Other("ModelOpt", arguments={"modelopt_quant": "fp8"}),
    Other("ModelOpt, as a dict", arguments={"modelopt_quant": {"algorithm": "fp8"}}),
    Other("quantize and serve", arguments={"quantize_and_serve": True}),
    Other("FlashRL profile", arguments={"rl_quant_profile": "/profile.pt"}),
    Other("index cache", arguments={"qsa_indexer_dtype": "fp8_e4m3"}),
    # of these the weights are said by the user
    Other("custom loader", arguments={"custom_weight_loader": ["my.loader"]}, options=KNOWN),
    Other("ModelOpt checkpoint", arguments={"modelopt_checkpoint_restore_path": "/checkpoint"}, options=KNOWN),
    Other("decrypted config", arguments={"decrypted_config_file": "/config.json"}, options=KNOWN),
    # a draft model
    Other("speculation", arguments=DRAFT),
    Other("draft model", arguments=DRAFT | {"speculative_draft_model_revision": "2" * 40}, both=DRAFT),
    Other("draft's quantization", arguments={"speculative_draft_model_quantization": "fp8"}, both=DRAFT),
    Other("draft's type of KV", arguments={"speculative_draft_kv_cache_dtype": "fp8_e4m3"}, both=DRAFT),
]


@pytest.fixture
def config(config):
    """The same without a process of the tier's own for each of these many servers."""
    config["secondary"][0]["io"] = "thread"
    return config


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other.name)
def test_a_server_that_differs_in_what_decides_the_bytes_finds_nothing(serve, publish, other):
    publish(**other.both)
    first = serve(**other.options)
    keys, _ = first.store(pages=2)
    publish(**(other.both | other.arguments))
    second = serve(other.pool() if other.pool else None, **other.storage, **other.options)
    assert second.backend.batch_exists(keys) == 0
    slots = second.take(2)
    before = second.fill(slots, 3)
    assert second.backend.batch_get_v1(keys, slots) == [False, False]
    assert second.content(slots) == before
    assert first.load(keys)[0] == [True, True]


def test_each_argument_that_the_identity_is_made_of_is_one_of_sglangs(publish, serve, monkeypatch):
    names = {*identity._COMPUTED_BY, *identity._DRAFTED_BY, *identity._ELSEWHERE}
    assert names <= set(ServerArgs.__struct_fields__)
    monkeypatch.setattr(identity, "_COMPUTED_BY", ("dtype", "gone_since"))
    with pytest.raises(ConfigError, match="has no argument 'gone_since', on which the identity of pages depends"):
        serve()


def test_what_sglang_has_resolved_counts_and_not_what_was_given(publish, serve):
    """An override of the model's architecture is in no field of the arguments."""
    publish(dtype="bfloat16")
    assert get_context().server_args.dtype == "auto"
    keys, content = serve().store(pages=1)
    assert serve().load(keys) == ([True], content)
    publish(dtype="float16")
    assert serve().backend.batch_exists(keys) == 0


# -- files


def model_in(folder: Path, seed: int = 0) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.bin").write_bytes(bytes(9_999) + bytes([seed]))
    return str(folder)


def test_a_folder_with_weights_is_their_digest_and_other_weights_are_another(serve, publish, tmp_path):
    publish(model_path=model_in(tmp_path / "model"), revision=None)
    keys, content = serve().store(pages=1)
    assert serve().load(keys) == ([True], content)
    model_in(tmp_path / "model", 1)
    assert serve().backend.batch_exists(keys) == 0


def test_scales_are_their_files_content_and_not_its_path(serve, publish, tmp_path):
    (tmp_path / "scales.json").write_text("[1]")
    publish(quantization_param_path=str(tmp_path / "scales.json"))
    keys, content = serve().store(pages=1)
    again = tmp_path / "elsewhere" / "scales.json"
    again.parent.mkdir()
    again.write_text("[1]")
    publish(quantization_param_path=str(again))
    assert serve().load(keys) == ([True], content)
    again.write_text("[2]")
    assert serve().backend.batch_exists(keys) == 0


@pytest.mark.parametrize("argument", ["lora_paths", "uno_lora_path"])
def test_an_adapter_is_its_files_content_though_its_id_is_made_from_name_and_path(serve, publish, tmp_path, argument):
    path = model_in(tmp_path / "adapter")
    adapter = LoRARef(lora_id=LoRARef.deterministic_id("a", path), lora_name="a", lora_path=path)
    arguments = {argument: [adapter] if argument == "lora_paths" else path}
    keys, _ = serve().store(pages=1)
    publish(**arguments)
    assert serve().backend.batch_exists(keys) == 0
    keys, content = serve().store(pages=1)
    assert serve().load(keys) == ([True], content)
    model_in(tmp_path / "adapter", 1)
    assert serve().backend.batch_exists(keys) == 0


def test_a_commit_is_looked_for_where_the_server_keeps_its_downloads(serve, publish, tmp_path):
    repository = tmp_path / "hub" / "models--test--model"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    publish(revision="main", download_dir=str(tmp_path / "hub"))
    keys, content = serve().store(pages=1)
    publish(revision="a" * 40)
    assert serve().load(keys) == ([True], content)


# -- replicated and sharded pools


@pytest.mark.parametrize(("rank", "size"), [(1, 2), (3, 4), (0, 1)])
def test_what_is_replicated_has_one_writer_and_readers_on_every_rank_of_any_number(serve, rank, size):
    writer = serve(mla_pool(), is_mla_model=True, tp_size=2)
    keys, content = writer.store(pages=3)
    reader = serve(mla_pool(), is_mla_model=True, tp_rank=rank, tp_size=size)
    assert reader.load(keys) == ([True] * 3, content)


def test_a_draft_pool_that_is_split_while_the_models_is_not_is_refused_where_one_rank_alone_would_write_it(serve):
    sidecars = {"draft": mha_pool()}
    with pytest.raises(
        ConfigError, match="pool 'draft' is split among 2 ranks, and SGLang backs up all pools"
    ) as error:
        serve(mla_pool(), sidecars=sidecars, is_mla_model=True, tp_size=2)
    assert len(str(error.value).splitlines()) == 1
    serve(mla_pool(), sidecars=sidecars, is_mla_model=True, tp_size=1)
    serve(mla_pool(), sidecars={"mamba": mamba_pool()}, is_mla_model=True, tp_size=2)


# -- what cannot be established is refused


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"arguments": {"revision": None}}, "its commit is not in the cache of the hub; set 'weights'"),
        ({"arguments": {"load_format": "dummy"}}, "load format 'dummy'"),
        ({"arguments": {"model_path": "/tmp"}}, "cannot be identified"),
        ({"arguments": {"custom_weight_loader": ["my.loader"]}}, "--custom-weight-loader brings others"),
        ({"arguments": {"modelopt_checkpoint_restore_path": "/x"}}, "--modelopt-checkpoint-restore-path brings"),
        ({"arguments": {"decrypted_config_file": "/x"}}, "--decrypted-config-file brings"),
        ({"arguments": {"weight_cache_mode": "client"}}, "--weight-cache-mode brings"),
        ({"arguments": {"quantization_param_path": "/not/there"}}, "--quantization-param-path '/not/there' cannot be"),
        ({"arguments": {"lora_paths": [LoRARef(lora_name="a", lora_path="an/adapter")]}}, "'an/adapter'.*as a folder"),
        ({"arguments": {"lora_paths": ["path"]}}, "--lora-paths has 'path', expected"),
        ({"arguments": DRAFT | {"speculative_draft_model_path": "/tmp"}}, "'/tmp' cannot .*set 'draft_weights'"),
        ({"arguments": DRAFT | {"speculative_draft_load_format": "dummy"}}, "'dummy'.*set 'draft_weights'"),
        ({"arguments": DRAFT | {"decrypted_draft_config_file": "/x"}}, "another config; set 'draft_weights'"),
        ({"pool": lambda: mha_pool(dtype=torch.uint8)}, "--kv-cache-dtype does not say of what"),
        ({"storage": {"model_name": None}}, "names no model"),
        ({"storage": {"tp_lcm_size": 4, "should_split_heads": True}}, "'tp_lcm_size' has no effect"),
    ],
)
def test_what_cannot_be_established_is_refused_in_one_line(serve, publish, changed, said):
    publish(**changed.get("arguments", {}))
    with pytest.raises(ConfigError, match=said) as error:
        serve(changed["pool"]() if "pool" in changed else None, **changed.get("storage", {}))
    assert len(str(error.value).splitlines()) == 1


def test_draft_weights_are_what_the_user_says_of_them(serve, publish):
    publish(**DRAFT | {"speculative_draft_model_path": "/not/there"})
    keys, content = serve(draft_weights="d1").store(pages=1)
    assert serve(draft_weights="d1").load(keys) == ([True], content)
    assert serve(draft_weights="d2").backend.batch_exists(keys) == 0


def test_without_published_arguments_nothing_is_attached(serve, monkeypatch):
    monkeypatch.setattr(get_context(), "_server_args", None)
    with pytest.raises(ConfigError, match="has published no server arguments"):
        serve(weights="said by the user")


@pytest.mark.parametrize("how", ["not applied", "another plugin's"])
def test_a_server_that_would_not_notice_an_update_of_its_weights_is_refused(serve, monkeypatch, how):
    target = f"{weight_updates.UPDATER}.update_weights_from_ipc"
    if how == "not applied":
        monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {target})
    else:
        monkeypatch.setitem(HookRegistry._hooks, target, [(None, print, None)])
    with pytest.raises(ConfigError, match=r"before update_weights_from_ipc, .*SGLANG_PLUGINS name 'kvtiers'"):
        serve()
