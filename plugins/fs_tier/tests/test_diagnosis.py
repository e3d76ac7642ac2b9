"""What ``kvtiers check`` reports about a directory, each with what to do about it."""

import pytest

MIB = 1 << 20


def findings(store, value_bytes=2 * MIB):
    return store.diagnose(value_bytes)


def the(level, part, found) -> str:
    [finding] = [finding for finding in found if part in finding.text]
    assert finding.level == level, finding
    assert level == "ok" or finding.fix
    return finding.text


@pytest.mark.usefixtures("disk")
def test_a_healthy_directory_has_only_good_findings(folder):
    found = findings(folder.open(capacity="64MiB"))
    assert {finding.level for finding in found} == {"ok"}
    the("ok", "file system: ext4, mounted at /", found)
    the("ok", "mode 0700; files 0600", found)
    the("ok", "capacity 64MiB, min_free 0B; 0 values of 0B held", found)
    the("ok", "more files can be made, 32 are needed", found)
    the("ok", "O_DIRECT", found)
    the("ok", "locks work", found)


def test_memory_is_no_disk(folder, mounted):
    mounted("tmpfs", "size=8m,mode=0700")
    assert f"tmpfs, mounted at {folder.path}" in the("warning", "tmpfs", findings(folder.open(capacity="4MiB")))


def test_a_capacity_that_the_disk_cannot_hold(folder, mounted):
    mounted("tmpfs", "size=8m,mode=0700")
    store = folder.open(capacity="64MiB", min_free="2MiB")
    the("warning", "no room for the capacity: capacity 64MiB, min_free 2MiB", findings(store))
    [fix] = [finding.fix for finding in findings(store) if "no room" in finding.text]
    assert fix.startswith("lower capacity to 5.9MiB" if "5.9" in fix else "lower capacity to 6MiB")


def test_less_free_space_than_is_to_be_left(folder, mounted):
    mounted("tmpfs", "size=8m,mode=0700")
    found = findings(folder.open(capacity="4MiB", min_free="1GiB"))
    the("warning", "nothing is written", found)
    (fix,) = (finding.fix for finding in found if "nothing is written" in finding.text)
    assert fix == "lower min_free: the whole file system has 8MiB"


def test_too_few_inodes(folder, mounted):
    mounted("tmpfs", "size=64m,nr_inodes=600,mode=0700")
    found = findings(folder.open(capacity="32MiB"), value_bytes=4096)
    assert "8192 values of 4KiB make the capacity" in the("warning", "more files can be made", found)


def test_direct_io_that_is_wanted_and_refused(folder, mounted):
    mounted("ramfs", "mode=0700")
    the("warning", "O_DIRECT does not work here: Invalid argument", findings(folder.open(direct=True)))


def test_direct_io_that_is_refused_and_not_wanted(folder, mounted):
    mounted("ramfs", "mode=0700")
    the("ok", "O_DIRECT does not work here (Invalid argument), and is not wanted", findings(folder.open()))


def test_a_directory_that_others_may_look_into(folder):
    folder.path.mkdir()
    folder.path.chmod(0o755)
    the("warning", "others may look into the directory", findings(folder.open()))


def test_what_was_written_and_deleted_just_now_is_in_the_figures(folder, value, names):
    store = folder.open()
    one, other = names(2)
    store.write(one, value(1))
    store.write(other, value(1))
    store.delete([one])
    the("ok", "1 value of 4KiB held", findings(store))


@pytest.mark.parametrize("read_only", [False, True])
def test_what_is_held_is_known_without_a_walk(folder, value, names, read_only):
    store = folder.open()
    for name in names(5):
        store.write(name, value(1))
    folder.close()
    the("ok", "5 values of 20KiB held", findings(folder.open(read_only=read_only)))


def test_a_read_only_diagnosis_writes_nothing(folder):
    folder.open()
    folder.close()
    before = folder.path.stat().st_mtime_ns, (folder.path / ".usage").stat().st_mtime_ns
    findings(folder.open(read_only=True))
    assert before == (folder.path.stat().st_mtime_ns, (folder.path / ".usage").stat().st_mtime_ns)
