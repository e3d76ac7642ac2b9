"""The fingerprint follows vLLM's config: what changes the bytes or the keys changes it, and nothing else does."""

import dataclasses
import enum
from types import SimpleNamespace

import pytest

from kvtiers.layout.storage_name import StorageNames
from kvtiers_vllm.engine import Engine
from kvtiers_vllm.identity import identity_of, row_layout

from .test_weights import COMMIT


@dataclasses.dataclass(frozen=True)
class Parallel:
    rank: int = 0
    world_size: int = 1
    tp_size: int = 1
    data_parallel_index: int = 0
    is_parallelism_agnostic: bool = True


class Backend(enum.Enum):
    """As vLLM's: the value is where the class lies."""

    TRITON = "vllm.v1.attention.backends.triton.TritonBackend"


class HfConfig(SimpleNamespace):
    def to_dict(self):
        return dict(vars(self))


def offloading(**more):
    group = SimpleNamespace(tokens_per_block=32, layer_names=("layer.0", "layer.1"))
    fields = {
        "groups": (group,),
        "worker_kv_bytes_per_block": 4096,
        "model": SimpleNamespace(name="some-org/model", dtype="bfloat16"),
        "cache": SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=2),
        "parallel": Parallel(),
        "replicated_layout": False,
        "canonical_layout": False,
        "kv_cache_layout": "LBHNC",
    }
    return SimpleNamespace(**fields | more)


def engine(**more):
    hf_config = HfConfig(_commit_hash=COMMIT, rope_theta=10000.0, sliding_window=None)
    sections = {
        "model_config": {
            "model": "some-org/model",
            "revision": None,
            "hf_config": hf_config,
            "quantization": None,
            "dtype": "bfloat16",
        },
        "load_config": {"load_format": "auto"},
        "cache_config": {"prefix_caching_hash_algo": "sha256", "cache_dtype": "auto"},
        "attention_config": {"backend": None},
        "device_config": {"device_type": "cuda"},
    }
    for path, value in more.items():
        section, _, name = path.partition("__")
        if name:
            sections[section][name] = value
        else:
            sections[section] = value
    config = SimpleNamespace(
        **{name: SimpleNamespace(**fields) if isinstance(fields, dict) else fields for name, fields in sections.items()}
    )
    spec = more.get("spec", "FullAttentionSpec(block_size=32, head_size=64)")
    group = SimpleNamespace(kv_cache_spec=type("Spec", (), {"__repr__": lambda self: spec})())
    return Engine(config, SimpleNamespace(kv_cache_groups=[group]))


@pytest.fixture(autouse=True)
def _no_seed_and_no_device(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr("kvtiers_vllm.identity._device", lambda: {"name": "some GPU"})


def fingerprint(engine_=None, offloading_=None, version="0.32.0", weights=None):
    identity = identity_of(engine_ or engine(), offloading_ or offloading(), version, weights)
    return row_layout(identity.model, offloading_ or offloading(), 8192).fingerprint


def test_two_processes_of_one_engine_share_it_whatever_their_rank_and_build():
    other = offloading(parallel=Parallel(rank=1, data_parallel_index=3))
    assert fingerprint() == fingerprint(offloading_=other) == fingerprint(version="0.32.0+cpu")


CHANGES = {
    "commit": {
        "engine_": engine(
            model_config__hf_config=HfConfig(_commit_hash=COMMIT[::-1], rope_theta=10000.0, sliding_window=None)
        )
    },
    "rope": {
        "engine_": engine(model_config__hf_config=HfConfig(_commit_hash=COMMIT, rope_theta=1.0, sliding_window=None))
    },
    "quantisation": {"engine_": engine(model_config__quantization="fp8")},
    "KV dtype": {"offloading_": offloading(model=SimpleNamespace(name="some-org/model", dtype="fp8"))},
    "cache dtype": {"engine_": engine(cache_config__cache_dtype="fp8_e5m2")},
    "computed scales": {"engine_": engine(cache_config__calculate_kv_scales=True)},
    "attention backend": {"engine_": engine(attention_config__backend="FLASHINFER")},
    "a group's backend": {"engine_": engine(attention_config__backend_per_kind={"mla_attention": Backend.TRITON})},
    "indexer": {"engine_": engine(attention_config__indexer_kv_dtype="fp8")},
    "quantisation by layer": {
        "engine_": engine(model_config__quantization_config={"linear": SimpleNamespace(bits=4, skip={"lm_head", "a"})})
    },
    "device": {"engine_": engine(device_config__device_type="cpu")},
    "KV layout": {"offloading_": offloading(kv_cache_layout="BLHNC")},
    "canonical": {"offloading_": offloading(canonical_layout=True)},
    "parallel map": {"offloading_": offloading(parallel=Parallel(world_size=2, tp_size=2))},
    "block size": {"offloading_": offloading(worker_kv_bytes_per_block=2048)},
    "blocks a chunk": {"offloading_": offloading(cache=SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=1))},
    "groups": {"engine_": engine(spec="SlidingWindowSpec(block_size=32, sliding_window=64)")},
    "hash algorithm": {"engine_": engine(cache_config__prefix_caching_hash_algo="sha256_cbor")},
    "release": {"version": "0.30.0"},
    "untested release": {"version": "0.32.9"},
    "given weights": {"weights": "v2"},
    "loader's options": {"engine_": engine(load_config__model_loader_extra_config={"pattern": "other-*"})},
    "files passed over": {"engine_": engine(load_config__ignore_patterns=["original/*"])},
    "speculation": {"engine_": engine(speculative_config={"method": "eagle", "draft_model_config": None})},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_changes_the_bytes_or_the_keys_is_another_fingerprint(change):
    assert fingerprint(**change) != fingerprint()


def test_a_seed_of_ones_own_is_part_of_it(monkeypatch):
    before = fingerprint()
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert before != fingerprint() == fingerprint()


@pytest.mark.parametrize(
    ("version", "algorithm"), [("0.28.0", "sha256"), ("0.32.0", "xxhash"), ("0.32.0", "xxhash_cbor")]
)
def test_a_random_seed_is_reported_with_the_setting_to_change_and_shares_nothing(monkeypatch, version, algorithm):
    unseeded = engine(cache_config__prefix_caching_hash_algo=algorithm)
    assert fingerprint(unseeded, version=version) != fingerprint(unseeded, version=version)
    (line,) = identity_of(unseeded, offloading(), version, None).warnings
    assert "nothing is shared" in line
    assert "set PYTHONHASHSEED" in line
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert fingerprint(unseeded, version=version) == fingerprint(unseeded, version=version)
    assert identity_of(unseeded, offloading(), version, None).warnings == ()


def test_weights_without_a_name_are_reported_with_the_setting_to_change_and_share_nothing():
    dummy = engine(load_config__load_format="dummy")
    assert fingerprint(dummy) != fingerprint(dummy)
    (line,) = identity_of(dummy, offloading(), "0.32.0", None).warnings
    assert "kvtiers.weights in kv_connector_extra_config" in line
    assert fingerprint(dummy, weights="mine") == fingerprint(dummy, weights="mine")
    assert identity_of(dummy, offloading(), "0.32.0", "mine").warnings == ()


DRAFT = f"commit-{COMMIT}+commit-{COMMIT[::-1]}"


def with_draft(model="some-org/draft", revision=None, settings=None, **more):
    config = HfConfig(_commit_hash=COMMIT[::-1], **more)
    draft = SimpleNamespace(model=model, revision=revision, hf_config=config, quantization=None)
    return engine(speculative_config={"method": "eagle", "draft_model_config": draft, **(settings or {})})


def weights_of_engine(engine_):
    return identity_of(engine_, offloading(), "0.32.0", None).model.weights


def test_a_draft_model_is_part_of_the_weights():
    assert weights_of_engine(with_draft()) == DRAFT
    assert weights_of_engine(with_draft(model="some-org/model", revision="v2")) == DRAFT, "of another revision"
    assert weights_of_engine(with_draft(model="some-org/model")) == f"commit-{COMMIT}", "it is the model itself"


@pytest.mark.parametrize("model", ["some-org/draft", "some-org/model"])
def test_a_draft_model_is_named_by_how_it_is_loaded_itself(model):
    dummy = with_draft(model=model, settings={"draft_load_config": SimpleNamespace(load_format="dummy")})
    assert fingerprint(dummy) != fingerprint(dummy), "random weights are no other engine's"
    (line,) = identity_of(dummy, offloading(), "0.32.0", None).warnings
    assert "load format 'dummy'" in line

    files = with_draft(model=model, settings={"draft_load_config": SimpleNamespace(load_format="safetensors")})
    files.vllm_config.load_config.load_format = "dummy"
    assert weights_of_engine(files).startswith("random-"), "the model's own are random still"


SPECULATIONS = {
    "method": with_draft(settings={"method": "eagle3"}),
    "attention backend": with_draft(settings={"attention_backend": Backend.TRITON}),
    "KV dtype": with_draft(settings={"kv_cache_dtype": "fp8"}),
    "quantisation": with_draft(settings={"quantization": "fp8"}),
    "the draft's config": with_draft(sliding_window=64),
    "how it is loaded": with_draft(
        settings={"draft_load_config": SimpleNamespace(load_format="auto", model_loader_extra_config={"file": "other"})}
    ),
}


@pytest.mark.parametrize("other", SPECULATIONS.values(), ids=SPECULATIONS.keys())
def test_what_changes_a_draft_models_kv_is_another_fingerprint(other):
    assert fingerprint(with_draft()) == fingerprint(with_draft()) != fingerprint(other)


def test_a_local_models_place_is_no_part_of_its_name(tmp_path):
    (tmp_path / "deep" / "tiny").mkdir(parents=True)
    local = offloading(model=SimpleNamespace(name=str(tmp_path / "deep" / "tiny"), dtype="float32"))
    model = identity_of(engine(), local, "0.32.0", "v1").model
    assert model.name == "tiny"
    assert StorageNames.of_layout("prod", row_layout(model, local, 4096)).prefix.startswith("prod/tiny-")


def test_a_row_of_the_engine_is_the_payload_and_the_seal_lies_behind_it():
    layout = row_layout(identity_of(engine(), offloading(), "0.32.0", None).model, offloading(), 12288)
    assert (layout.payload_bytes(0), layout.value_bytes(0)) == (12288, 16384)
    assert layout.tokens_per_chunk(0) == 64


@dataclasses.dataclass(frozen=True)
class Spec:
    num_kv_heads: int
    head_size: int


def kv_layout(tp, *, heads, head_size=64, canonical, own_rows=True):
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=Spec(heads, head_size))])
    config = offloading(
        parallel=Parallel(world_size=tp, tp_size=tp), worker_kv_bytes_per_block=8192 // tp, canonical_layout=canonical
    )
    found = identity_of(Engine(engine().vllm_config, groups), config, "0.32.0", "v1", own_rows=own_rows)
    return found.model.kv_layout


def test_canonical_rows_of_our_own_are_the_same_for_any_number_of_ranks_and_no_others():
    assert kv_layout(1, heads=4, canonical=True) == kv_layout(2, heads=2, canonical=True)
    assert kv_layout(1, heads=4, canonical=True) != kv_layout(1, heads=4, head_size=32, canonical=True)
    assert kv_layout(1, heads=4, canonical=False) != kv_layout(2, heads=2, canonical=False)
    assert kv_layout(1, heads=4, canonical=True) != kv_layout(1, heads=4, canonical=False)
    vllms = [kv_layout(tp, heads=4 // tp, canonical=True, own_rows=False) for tp in (1, 2)]
    assert vllms[0] != vllms[1]


def test_an_engine_whose_config_is_not_found_shares_nothing_and_says_so():
    unknown = Engine(None, None)
    identity = identity_of(unknown, offloading(), "0.32.0", None)
    assert "vLLM's config was not found" in identity.warnings[0]
    assert fingerprint(unknown) != fingerprint(unknown)
