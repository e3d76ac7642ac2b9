"""Links and pipes planted below the root: nothing outside is read, written or removed."""

import os

import pytest

from kvtiers.testing.running import open_descriptors
from kvtiers_fs.directory import open_by_parts, opener


@pytest.fixture(params=["as this system does it", "part by part"])
def store(request, folder):
    store = folder.open()
    if request.param == "part by part":
        store._directory._open = open_by_parts
    return store


@pytest.fixture
def outside(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    return outside


def plant_folder(folder, name, outside, level):
    """Replace one of the folders on the way to a value by a link to one outside that has the same things in it."""
    shard = folder.file(name).parent
    link = [shard, shard.parent, shard.parent.parent][level]
    inner = outside / shard.relative_to(link)
    inner.mkdir(parents=True, exist_ok=True)
    victim = inner / folder.file(name).name
    victim.write_bytes(b"s" * 4096)
    link.rename(link.with_name("moved"))
    link.symlink_to(outside)
    return victim


def swap_for(folder, name, make):
    """Put what ``make`` makes in this place, in one step: a folder that is empty for a moment may be removed."""
    other = folder.path.with_name("other")
    make(other)
    other.replace(folder.file(name))


@pytest.mark.parametrize("level", [0, 1, 2], ids=["shard", "model", "namespace"])
def test_a_link_in_place_of_a_folder_is_not_followed(folder, store, outside, value, names, read, level):
    [name] = names(1)
    store.write(name, value(1))
    victim = plant_folder(folder, name, outside, level)
    before = sorted(outside.rglob("*"))
    assert read(store, name) is None
    assert store.exists([name]) == [False]
    store.delete([name])
    with pytest.raises(OSError, match=r"symbolic links|Not a directory"):
        store.write(name, value(2))
    assert name not in folder.names(store)
    folder.settle(store)
    assert sorted(outside.rglob("*")) == before
    assert victim.read_bytes() == b"s" * 4096


def test_a_link_in_place_of_a_value_is_replaced_not_followed(folder, store, outside, value, names, read):
    [name] = names(1)
    store.write(name, value(1))
    victim = outside / "secret"
    victim.write_bytes(b"s" * 4096)
    swap_for(folder, name, lambda path: path.symlink_to(victim))
    assert store.exists([name]) == [False]
    assert read(store, name) is None
    assert folder.names(store) == []
    store.write(name, value(2))
    assert read(store, name) == bytes(value(2))
    assert victim.read_bytes() == b"s" * 4096


def test_a_pipe_in_place_of_a_value_is_absent_without_waiting_for_its_writer(folder, store, value, names, read):
    [name] = names(1)
    store.write(name, value(1))
    swap_for(folder, name, os.mkfifo)
    assert store.exists([name]) == [False]
    assert read(store, name) is None
    store.write(name, value(2))
    assert read(store, name) == bytes(value(2))


@pytest.mark.parametrize("own", [".usage", ".kvtiers-fs"])
def test_a_link_in_place_of_a_file_of_our_own_is_refused(folder, outside, own):
    folder.open()
    folder.close()
    (folder.path / own).rename(outside / own)
    (folder.path / own).symlink_to(outside / own)
    with pytest.raises(Exception, match="symbolic links"):
        folder.open()


def test_both_ways_to_open_find_the_same(tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/c").write_text("here")
    (tmp_path / "a/link").symlink_to("b")
    root = os.open(tmp_path, os.O_RDONLY)
    try:
        for way in (opener(), open_by_parts):
            fd = way(root, "a/b/c", os.O_RDONLY)
            assert os.read(fd, 10) == b"here"
            os.close(fd)
            before = open_descriptors()
            for path, error in (("a/link/c", OSError), ("a/link", OSError), ("a/x/c", FileNotFoundError)):
                with pytest.raises(error):
                    way(root, path, os.O_RDONLY)
            with pytest.raises(NotADirectoryError):
                way(root, "a/b/c/d", os.O_RDONLY)
            assert open_descriptors() == before
    finally:
        os.close(root)
