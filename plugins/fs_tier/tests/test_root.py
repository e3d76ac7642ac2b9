"""Which directories are taken, and which are refused, each with a line that says what to do."""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from kvtiers.api import ConfigError, TierContext, TierUnavailable
from kvtiers.testing.running import open_descriptors
from kvtiers_fs.config import FsConfig
from kvtiers_fs.plugin import kvtiers_tier
from kvtiers_fs.store import FsStore


def refusal(folder, **options) -> str:
    with pytest.raises(ConfigError) as refused:
        folder.open(**options)
    [line] = refused.value.problems
    return line


def test_a_directory_with_other_things_in_it_is_refused_and_left_alone(folder):
    folder.path.mkdir(0o700)
    (folder.path / "thesis.tex").write_text("x")
    assert "is neither empty nor a directory of this tier" in refusal(folder)
    assert [path.name for path in folder.path.iterdir()] == ["thesis.tex"]


def test_the_top_of_a_new_file_system_is_taken(folder):
    (folder.path / "lost+found").mkdir(0o700, parents=True)
    folder.path.chmod(0o700)
    folder.open()


def test_a_directory_of_another_format_is_refused(folder):
    folder.open()
    folder.close()
    (folder.path / ".kvtiers-fs").write_text("kvtiers-fs 2\n")
    assert "made by another version of this tier (b'kvtiers-fs 2\\n'" in refusal(folder)


def test_a_foreign_owner_is_refused_unless_his_group_is_trusted(folder, monkeypatch):
    """Who we are is changed, not whose the directory is: any user can do that."""
    folder.path.mkdir(0o700)
    owner, gid = os.geteuid(), folder.path.stat().st_gid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    monkeypatch.setattr(os, "getgroups", lambda: [gid, gid + 1])
    assert f"is owned by uid {owner}, this process is uid {owner + 1}" in refusal(folder)
    assert f"is owned by uid {owner}" in refusal(folder, group=str(gid + 1))
    folder.open(group=str(gid), mode="0660")


@pytest.mark.parametrize(("mode", "said"), [(0o777, "all users may write"), (0o1777, "all users may write")])
def test_a_directory_that_any_user_may_write_to_is_refused(folder, mode, said):
    folder.path.mkdir()
    folder.path.chmod(mode)
    assert said in refusal(folder)


def test_a_directory_that_a_group_may_write_to_needs_the_trust_said(folder):
    folder.path.mkdir()
    folder.path.chmod(0o770)
    assert "may write to it (mode 0770); chmod g-w it, or trust that group with" in refusal(folder)
    folder.open(group=str(folder.path.stat().st_gid))


def test_a_symbolic_link_as_the_path_is_refused(folder, tmp_path):
    (tmp_path / "real").mkdir(0o700)
    folder.path.symlink_to("real")
    assert refusal(folder).endswith(f"is a symbolic link, which is not followed; write '{tmp_path}/real' instead")
    assert list((tmp_path / "real").iterdir()) == []


def test_a_missing_parent_is_not_made(folder, tmp_path):
    folder.path = tmp_path / "not mounted" / "values"
    assert f"{str(folder.path.parent)!r} does not exist; make it, or mount" in refusal(folder)
    assert not folder.path.parent.exists()


def test_a_path_that_is_a_file_is_refused(folder):
    folder.path.write_text("x")
    assert "is not a directory" in refusal(folder)


def test_an_unknown_group_is_refused(folder):
    assert "there is no group 'no-such-group'" in refusal(folder, group="no-such-group")


def test_many_stores_that_open_a_new_directory_at_once_all_can(folder):
    barrier, stores, errors = threading.Barrier(16), [], []

    def start():
        barrier.wait(60)
        try:
            stores.append(folder.open())
        except ConfigError as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert len(stores) == 16
    assert not folder.temps()


def test_nothing_stays_open_when_opening_is_refused(folder):
    folder.path.mkdir()
    folder.path.chmod(0o777)
    refusal(folder)
    before = open_descriptors()
    refusal(folder)
    assert open_descriptors() == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"path": "values"}, "absolute path"),
        ({"path": "/a/../b"}, "absolute path"),
        ({"capacity": 0}, "greater than 0"),
        ({"mode": "0644"}, "'0600', '0640' or '0660'"),
        ({"mode": 0o666}, "'0600', '0640' or '0660'"),
        ({"max_age": "0s"}, "greater than 0"),
    ],
)
def test_a_wrong_option_is_refused(tmp_path, options, said):
    with pytest.raises(ValueError, match=said):
        FsConfig.model_validate({"type": "fs", "path": str(tmp_path), "capacity": "1GiB", **options})


def test_a_mode_may_be_written_without_quotes_as_yaml_reads_it(tmp_path):
    config = FsConfig.model_validate({"type": "fs", "path": str(tmp_path), "capacity": "1GiB", "mode": 0o660})
    assert config.mode == "0660"


def test_a_home_directory_may_be_written_as_a_tilde(monkeypatch):
    monkeypatch.setenv("HOME", "/home/kv")
    assert str(FsConfig(type="fs", path="~/cache", capacity=1).path) == "/home/kv/cache"


def test_a_capacity_without_room_for_one_value_is_one_clear_line(tmp_path):
    config = FsConfig(type="fs", path=tmp_path / "values", capacity="1MiB")
    context = TierContext("disk", 2 << 20, "ns", read_only=False, region=memoryview(b""), row_stride=2 << 20)
    with pytest.raises(ConfigError, match="disk: capacity 1048576 bytes has no room for one value of 2097152 bytes"):
        kvtiers_tier().open(config, context)
    assert not (tmp_path / "values").exists()


_AS_ANOTHER_USER = """
import os, sys
from kvtiers.api import ConfigError
from kvtiers_fs.config import FsConfig
from kvtiers_fs.store import FsStore

path, name, group = sys.argv[1:]
config = FsConfig(type="fs", path=path, capacity="1GiB", mode="0640", group=group)
import kvtiers_fs.diagnosis
try:
    os.setgroups([int(group)])
    os.setresgid(int(group), int(group), int(group))
    os.setresuid(12345, 12345, 12345)
except PermissionError:
    os.geteuid = lambda: 12345  # another user by name alone; the modes decide what is allowed
print(os.geteuid())
try:
    FsStore(config)
except ConfigError as error:
    print(error)
try:
    FsStore(config.model_copy(update={"group": "54399"}))
except ConfigError as error:
    print(error)
back = memoryview(bytearray(4096))
assert FsStore(config, read_only=True).read_into(name, back)
print(bytes(back[:1]).hex())
"""


def test_a_user_who_may_only_read_is_advised_to_set_read_only_and_one_outside_the_group_to_join_it(
    folder, value, names, group
):
    [name] = names(1)
    with tempfile.TemporaryDirectory() as top:
        Path(top).chmod(0o755)
        folder.path = Path(top, "values")
        folder.open(mode="0640", group=str(group)).write(name, value(0xAB))
        folder.close()
        everything = [folder.path, *folder.path.rglob("*")]
        for path in everything:
            path.chmod(path.stat().st_mode & ~0o222)
        command = [sys.executable, "-c", _AS_ANOTHER_USER, str(folder.path), name, str(group)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        for path in everything:
            path.chmod(0o700)
    uid, refused, stranger, found = done.stdout.splitlines()
    assert f"(uid {uid}) is not in the group with id 54399" in stranger
    assert f"cannot be written by uid {uid}" in refused
    assert refused.endswith("set 'read_only: true'")
    assert found == "ab"


def test_a_root_that_is_removed_while_it_is_in_use_is_made_again_at_the_next_write(folder, value, names, read, caplog):
    store = folder.open(capacity=100 * 4096)
    before, *after = names(40)
    store.write(before, value(1))
    while folder.path.exists():  # the evictor removes empty folders at the same time
        shutil.rmtree(folder.path, ignore_errors=True)
    assert store.exists([before]) == [False]
    assert not read(store, before)
    threads = [threading.Thread(target=store.write, args=(name, value(2))) for name in after]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(read(store, name) for name in after)
    assert folder.names(store) == sorted(after)
    folder.settle(store)
    assert store.stats()["values"] == len(after)
    lines = [
        record.getMessage() for record in caplog.records if "was removed while it was in use" in record.getMessage()
    ]
    assert len(lines) == 1
    other = folder.open()
    assert read(other, after[0])


def test_a_root_that_is_removed_with_the_folder_that_it_is_in_fails_each_write_at_once(folder, value, names):
    store = folder.open()
    folder.path.rename(folder.path.with_name("moved"))
    shutil.rmtree(folder.path.with_name("moved"))
    folder.path.symlink_to("/nowhere")
    with pytest.raises(ConfigError, match="symbolic link"):
        store.write(*names(1), value(1))
    folder.path.unlink()
    store.write(*names(1), value(1))


def test_a_parent_that_is_there_and_takes_no_folder_is_not_called_absent():
    with pytest.raises(TierUnavailable, match="'/proc/kvtiers': No such file or directory"):
        FsStore(FsConfig(type="fs", path="/proc/kvtiers", capacity="64MiB", min_free=0))
