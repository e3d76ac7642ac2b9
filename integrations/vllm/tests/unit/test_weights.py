"""Which weights these are: equal for equal files, another one for every change, random where that cannot be known."""

import json
import struct
from types import SimpleNamespace

import pytest

from kvtiers.model_files import digest_of_folder
from kvtiers_vllm.weights import is_random, weights_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_tensors(path, tensors, metadata=None):
    """Write a safetensors file: each tensor's bytes by its name."""
    header, at = {"__metadata__": metadata or {}}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))


LARGE = bytes(range(256)) * 1024  # 256 KiB: not read whole


def model(folder, *, small=b"weights", large=LARGE, config="{}", name="layer"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config)
    write_tensors(folder / "model.safetensors", {f"{name}.0": small, f"{name}.1": large, f"{name}.2": b""})
    return folder


def config(model, **more):
    return SimpleNamespace(model=str(model), revision=None, hf_config=SimpleNamespace(), **more)


def test_two_copies_are_the_same_weights(tmp_path):
    assert digest_of_folder(model(tmp_path / "a")) == digest_of_folder(model(tmp_path / "b" / "c"))


@pytest.mark.parametrize(
    "change",
    [
        {"small": b"weightz"},
        {"large": b"?" + LARGE[1:]},
        {"large": LARGE[:-1] + b"?"},
        {"large": bytes(len(LARGE))},
        {"config": '{"rope_theta": 1}'},
        {"name": "block"},
    ],
    ids=["a short tensor", "a tensor's first byte", "a tensor's last byte", "a whole tensor", "config", "names"],
)
def test_every_change_is_another_model(tmp_path, change):
    assert digest_of_folder(model(tmp_path / "a")) != digest_of_folder(model(tmp_path / "b", **change))


def test_the_models_own_code_is_part_of_it(tmp_path):
    (model(tmp_path) / "modeling_own.py").write_text("scale = 1\n")
    before = digest_of_folder(tmp_path)
    (tmp_path / "modeling_own.py").write_text("scale = 2\n")
    assert digest_of_folder(tmp_path) != before


def test_a_tokenizer_changes_nothing(tmp_path):
    before = digest_of_folder(model(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "README.md").write_text("about")
    assert digest_of_folder(tmp_path) == before


def test_files_of_other_formats_are_sampled(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(LARGE * 8)
    before = digest_of_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(LARGE * 7 + bytes(len(LARGE)))
    assert digest_of_folder(tmp_path) != before


def test_a_local_folder_needs_no_input(tmp_path):
    weights, why = weights_of(config(model(tmp_path)), "auto")
    assert (weights, why) == (digest_of_folder(tmp_path), "")


def test_a_hubs_model_is_its_commit():
    found = config(
        "some-org/model",
    )
    found.hf_config._commit_hash = COMMIT
    assert weights_of(found, "auto") == (f"commit-{COMMIT}", "")


@pytest.mark.parametrize("commit", [None, "main", "v1.0", COMMIT[:12]])
def test_a_branch_is_no_name(commit):
    found = config("some-org/absent-model")
    found.hf_config._commit_hash = commit
    weights, why = weights_of(found, "auto")
    assert is_random(weights)
    assert "no commit of 'some-org/absent-model' is known" in why


@pytest.mark.parametrize(
    "load_format", ["dummy", "ipc_cache", "modelexpress", "runai_streamer", "tensorizer", "a_plugins_own", "None"]
)
def test_weights_that_do_not_come_from_the_models_files_are_random_each_time(tmp_path, load_format):
    first, why = weights_of(config(model(tmp_path)), load_format)
    second, _ = weights_of(config(model(tmp_path)), load_format)
    assert is_random(first)
    assert first != second
    assert load_format in why


@pytest.mark.parametrize(
    "load_format", ["auto", "hf", "safetensors", "pt", "npcache", "mistral", "fastsafetensors", "sharded_state"]
)
def test_weights_that_do_are_named_by_them(tmp_path, load_format):
    assert weights_of(config(model(tmp_path)), load_format) == (digest_of_folder(tmp_path), "")


@pytest.mark.parametrize("content", [b"", b"\xff" * 16, struct.pack("<Q", 4) + b"nope"])
def test_a_file_that_is_none_is_random_and_not_an_error(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    weights, why = weights_of(config(tmp_path), "auto")
    assert is_random(weights)
    assert "cannot be read" in why


def test_a_folder_without_weights_is_random(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    weights, why = weights_of(config(tmp_path), "auto")
    assert is_random(weights)
    assert "no file with weights" in why
