"""An adapter is what its files are: a name, a number or a place says nothing."""

import os
from types import SimpleNamespace

import pytest

from kvtiers.integrations.vllm.stack.adapters import Adapters


def adapter(folder, content=b"weights", number=1, *, inplace=False):
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.bin").write_bytes(content)
    (folder / "adapter_config.json").write_text("{}")
    return SimpleNamespace(lora_name="mine", lora_int_id=number, lora_path=str(folder), load_inplace=inplace)


def test_two_adapters_of_one_name_are_two_and_copies_of_one_are_one(tmp_path):
    one = Adapters().digest(adapter(tmp_path / "one", b"weights"))
    assert one is not None
    assert Adapters().digest(adapter(tmp_path / "two", b"others!")) not in {one, None}
    assert Adapters().digest(adapter(tmp_path / "copy", b"weights")) == one


def test_the_settings_of_an_adapter_are_part_of_it(tmp_path):
    lora = adapter(tmp_path / "one")
    before = Adapters().digest(lora)
    (tmp_path / "one" / "adapter_config.json").write_text('{"lora_alpha": 2}')
    assert Adapters().digest(lora) != before


def test_an_adapter_that_is_loaded_anew_is_another_and_that_can_be_seen(tmp_path):
    adapters = Adapters()
    first = adapters.digest(adapter(tmp_path / "one", b"before"))
    assert not adapters.has_changed(1)
    second = adapters.digest(adapter(tmp_path / "one", b"after!", inplace=True))
    assert second not in {first, None}
    assert adapters.has_changed(1)
    assert adapters.digest(adapter(tmp_path / "two", number=2)) is not None
    assert not adapters.has_changed(2)
    assert adapters.reloaded == {1}


def test_files_that_change_behind_vllms_back_make_an_adapter_unknown_for_good(tmp_path, caplog):
    adapters = Adapters()
    lora = adapter(tmp_path / "one", b"before")
    before = adapters.digest(lora)
    assert adapters.digest(lora) == before
    (tmp_path / "one" / "adapter_model.bin").write_bytes(b"after")
    assert adapters.digest(lora) is None
    assert adapters.has_changed(1)
    (tmp_path / "one" / "adapter_model.bin").write_bytes(b"before")
    os.utime(tmp_path / "one" / "adapter_model.bin", ns=(1, 1))
    assert adapters.digest(lora) is None
    assert len(caplog.records) == 1


@pytest.mark.parametrize("missing", ["folder", "weights"])
def test_an_adapter_without_files_is_unknown(tmp_path, missing):
    lora = adapter(tmp_path / "one")
    (tmp_path / "one" / "adapter_model.bin").unlink()
    if missing == "folder":
        lora.lora_path = "somebody/adapter-on-a-hub"
    assert Adapters().digest(lora) is None
