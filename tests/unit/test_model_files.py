"""The identity that a model's files give, without an engine: a digest, a commit, or none."""

import sys
from types import ModuleType
from typing import Any

import pytest

from kvtiers.model_files import commit_of, digest_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(monkeypatch) -> dict[Any, str]:
    """The hub's library with a cache of its own: the path of a file, by (model, cache_dir, revision)."""
    cache: dict[Any, str] = {}
    library = ModuleType("huggingface_hub")
    library.try_to_load_from_cache = lambda model, file, cache_dir, revision: cache.get((model, cache_dir, revision))
    monkeypatch.setitem(sys.modules, "huggingface_hub", library)
    return cache


def test_a_commit_is_taken_as_it_is_and_a_branch_is_what_the_cache_has_it_at(hub):
    hub["org/model", None, "main"] = f"/cache/snapshots/{COMMIT}/config.json"
    hub["org/model", "/elsewhere", None] = f"/elsewhere/snapshots/{COMMIT[::-1]}/config.json"
    assert commit_of("org/model", "f" * 40) == "f" * 40
    assert commit_of("org/model", "main") == COMMIT
    assert commit_of("org/model", None, "/elsewhere") == COMMIT[::-1]
    assert commit_of("org/model", None) == ""
    hub["org/model", None, "v1"] = "/cache/snapshots/v1/config.json"
    assert commit_of("org/model", "v1") == "", "a folder that is named after a branch is no commit"


def test_without_the_hubs_library_a_branch_has_no_commit(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert commit_of("org/model", "main") == ""


def test_a_folder_and_a_file_have_digests_and_a_name_of_the_hub_has_none(tmp_path):
    assert digest_of("org/model") == ""
    with pytest.raises(ValueError, match="no file with weights"):
        digest_of(str(tmp_path))
    (tmp_path / "model.bin").write_bytes(b"1" * 10_000)
    first = digest_of(str(tmp_path))
    (tmp_path / "model.bin").write_bytes(b"1" * 9_999 + b"2")
    assert digest_of(str(tmp_path)) != first


def test_a_header_that_lacks_a_field_is_unreadable(tmp_path):
    header = b'{"t": {"dtype": "U8"}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match="data_offsets"):
        digest_of(str(tmp_path))
