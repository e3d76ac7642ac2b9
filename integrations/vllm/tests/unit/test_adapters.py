"""An adapter is what its files are: a name, a number or a place says nothing."""

import os
from types import SimpleNamespace

from kvtiers_vllm.stack.adapters import Adapters, Files


def adapter(folder, content=b"weights", number=1, *, inplace=False):
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.bin").write_bytes(content)
    (folder / "adapter_config.json").write_text("{}")
    return SimpleNamespace(lora_name="mine", lora_int_id=number, lora_path=str(folder), load_inplace=inplace)


def digest(adapters, lora, **more):
    return adapters.digest(lora, Files.of(lora), **more)


def test_two_adapters_of_one_name_are_two_and_copies_of_one_are_one(tmp_path):
    one = digest(Adapters(), adapter(tmp_path / "one", b"weights"))
    assert one is not None
    assert digest(Adapters(), adapter(tmp_path / "two", b"others!")) not in {one, None}
    assert digest(Adapters(), adapter(tmp_path / "copy", b"weights")) == one


def test_the_settings_of_an_adapter_are_part_of_it(tmp_path):
    lora = adapter(tmp_path / "one")
    before = digest(Adapters(), lora)
    (tmp_path / "one" / "adapter_config.json").write_text('{"lora_alpha": 2}')
    assert digest(Adapters(), lora) != before


def test_an_adapter_that_is_reloaded_is_another_and_that_can_be_seen(tmp_path):
    adapters = Adapters()
    first = digest(adapters, adapter(tmp_path / "one", b"before"))
    assert adapters.changes[1] == 0
    second = digest(adapters, adapter(tmp_path / "one", b"after!", inplace=True))
    assert second not in {first, None}
    assert digest(adapters, adapter(tmp_path / "two", number=2)) is not None
    assert adapters.changes == {1: 1}


def test_files_that_change_behind_vllms_back_make_an_adapter_unknown_for_good(tmp_path, caplog):
    adapters = Adapters()
    lora = adapter(tmp_path / "one", b"before")
    before = digest(adapters, lora)
    assert digest(adapters, lora) == before
    (tmp_path / "one" / "adapter_model.bin").write_bytes(b"after")
    assert not adapters.is_unchanged(lora)
    assert digest(adapters, lora) is None
    assert adapters.changes[1] == 1
    (tmp_path / "one" / "adapter_model.bin").write_bytes(b"before")
    os.utime(tmp_path / "one" / "adapter_model.bin", ns=(1, 1))
    assert digest(adapters, lora) is None
    assert len(caplog.records) == 1


def test_files_that_are_put_back_are_not_what_they_were(tmp_path):
    adapters = Adapters()
    lora = adapter(tmp_path / "one", b"before")
    digest(adapters, lora)
    assert adapters.is_unchanged(lora)
    file, aside = tmp_path / "one" / "adapter_model.bin", tmp_path / "aside"
    times = file.stat().st_mtime_ns
    file.rename(aside)
    file.write_bytes(b"others")
    aside.rename(file)
    assert file.stat().st_mtime_ns == times
    assert not adapters.is_unchanged(lora), "vLLM may have loaded the others in between"


def test_an_adapter_without_weights_is_unknown(tmp_path):
    lora = adapter(tmp_path / "one")
    (tmp_path / "one" / "adapter_model.bin").unlink()
    assert digest(Adapters(), lora) is None


def test_files_that_vllm_may_have_loaded_as_they_were_leave_the_adapter_unknown_until_it_is_reloaded(tmp_path):
    adapters = Adapters()
    assert digest(adapters, adapter(tmp_path / "one"), as_loaded=False) is None
    assert digest(adapters, adapter(tmp_path / "one")) is None
    again = adapter(tmp_path / "one", inplace=True)
    known = digest(adapters, again)
    assert known is not None
    assert digest(adapters, again, as_loaded=False) == known, "they are those that were seen before"
