import ctypes
import gc
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtiers.api import StartError
from kvtiers.region import memfd as memfd_module
from kvtiers.region.memfd import Mapping, bind_to_node, create_memfd, map_memory, require_linux

PAGE = mmap.PAGESIZE


@pytest.fixture
def memfd():
    fd = create_memfd("kvtiers-unit-test", 4 * PAGE)
    yield fd
    os.close(fd)


def test_a_large_mapping_begins_where_a_huge_page_may_and_leaves_nothing_mapped_beside_it():
    nbytes = 3 * (2 << 20) + PAGE
    fd = create_memfd("kvtiers-unit-test", nbytes)
    before = mapped_bytes()
    mapping = Mapping(fd, nbytes, nbytes)
    assert mapping.address % (2 << 20) == 0
    assert mapped_bytes() - before == nbytes
    mapping.view[nbytes - 1] = 7
    assert os.pread(fd, 1, nbytes - 1) == b"\7"
    assert mapping.close()
    assert mapped_bytes() == before
    os.close(fd)


def mapped_bytes():
    """Bytes of this process's mappings that are shared or not accessible."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = [line.split()[0].split("-") for line in lines if " ---p " in line or "kvtiers-unit-test" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in ends)


def is_mapped(memfd):
    return f" {os.fstat(memfd).st_ino} " in Path("/proc/self/maps").read_text()


def test_two_mappings_share_their_bytes(memfd):
    one, other = Mapping(memfd, 4 * PAGE, 4 * PAGE), Mapping(memfd, 4 * PAGE, 4 * PAGE)
    one.view[PAGE] = 9
    assert other.view[PAGE] == 9


def test_the_view_is_flat_writable_bytes_and_only_as_long_as_asked(memfd):
    view = Mapping(memfd, 4 * PAGE, 3 * PAGE + 5).view
    assert (view.format, view.ndim, view.readonly, view.nbytes, view.contiguous) == ("B", 1, False, 3 * PAGE + 5, True)


def test_the_memory_is_unmapped_when_the_last_view_is_gone(memfd):
    mapping = Mapping(memfd, 4 * PAGE, 4 * PAGE)
    assert is_mapped(memfd)
    assert mapping.close()
    assert not is_mapped(memfd)


@pytest.mark.parametrize(
    "use",
    [lambda view: view, lambda view: view[10:20], lambda view: np.frombuffer(view, np.uint8)[5:]],
    ids=["the view", "a slice", "an array"],
)
def test_a_buffer_in_use_keeps_the_memory_until_it_is_gone(memfd, use):
    mapping = Mapping(memfd, 4 * PAGE, 4 * PAGE)
    kept = use(mapping.view)
    assert not mapping.close()
    kept[0] = 3
    assert kept[0] == 3
    with pytest.raises(ValueError, match="closed"):
        _ = mapping.view
    del kept
    gc.collect()
    assert not is_mapped(memfd)


def test_memory_of_ones_own_needs_no_descriptor():
    mapping = Mapping(-1, 4 * PAGE, 4 * PAGE)
    mapping.view[-1] = 5
    assert mapping.view[-1] == 5
    assert mapping.close()


def test_no_process_can_cut_the_memory_off_under_the_others(memfd):
    with pytest.raises(PermissionError):
        os.ftruncate(memfd, PAGE)
    with pytest.raises(PermissionError):
        os.ftruncate(memfd, 8 * PAGE)


def flags_of(mapping):
    """What the kernel notes about a mapping (proc(5), VmFlags)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= mapping.address < int(found[2], 16)
        elif inside and line.startswith("VmFlags"):
            return line.split()
    raise AssertionError("it is not mapped")


@pytest.mark.parametrize("is_shared", [True, False])
def test_no_core_file_has_the_rows_in_it_unless_it_is_asked_for(memfd, is_shared):
    fd = memfd if is_shared else -1
    assert "dd" in flags_of(Mapping(fd, 4 * PAGE, 4 * PAGE))
    assert "dd" not in flags_of(Mapping(fd, 4 * PAGE, 4 * PAGE, core_dumps=True))


def in_forked_child(fork, look):
    """Fork, and return what ``look`` says in the child; a child that is killed by a signal is an error."""
    pid = fork()
    if pid == 0:
        status = 99
        try:
            status = look()
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert os.WIFEXITED(status), f"the child was killed by signal {os.WTERMSIG(status)}"
    return os.WEXITSTATUS(status)


@pytest.mark.usefixtures("no_switch")
def test_a_child_that_a_library_forks_in_c_does_not_have_the_memory(memfd):
    mapping = Mapping(memfd, 4 * PAGE, 4 * PAGE)
    assert is_mapped(memfd)
    assert in_forked_child(ctypes.PyDLL(None).fork, lambda: int(is_mapped(memfd))) == 0
    assert mapping.view[0] == 0


def test_a_child_that_python_forks_has_memory_of_its_own_in_its_place_and_so_have_its_children(memfd):
    mapping = Mapping(memfd, 4 * PAGE, 4 * PAGE)
    array = np.frombuffer(mapping.view, np.uint8)
    array[:] = 7

    def look():
        if is_mapped(memfd) or array.any():
            return 1
        array[:] = 9
        return in_forked_child(os.fork, lambda: int(array[0] != 9))

    assert in_forked_child(os.fork, look) == 0
    assert array.min() == array.max() == 7


@pytest.mark.usefixtures("no_switch")
def test_what_a_child_has_put_into_the_hole_before_the_hook_ran_is_left_there():
    nbytes = 64 << 20
    fd = create_memfd("kvtiers-unit-test", nbytes)
    mapping = Mapping(fd, nbytes, nbytes)
    os.close(fd)

    def look():  # forked in C: no hook has run
        there = memfd_module._libc.mmap(mapping.address + (5 << 20), 1 << 20, 3, 0x22 | 0x100000, -1, 0)
        ctypes.memset(there, 5, 1 << 20)
        mapping.detach()
        view = mapping.view
        around = not any(view[:: 1 << 20][i] for i in range(64) if i != 5)
        return 0 if around and view[5 << 20] == view[(6 << 20) - 1] == 5 else 1

    assert in_forked_child(ctypes.PyDLL(None).fork, look) == 0


def test_the_descriptor_is_not_inherited(memfd):
    assert not os.get_inheritable(memfd)


def test_memory_that_cannot_be_mapped_is_one_clear_line(memfd):
    with pytest.raises(StartError, match=r"cannot map 18446744073709547520 bytes of the region: .*memory"):
        map_memory(memfd, 2**64 - 4096, PAGE)


def test_a_node_that_does_not_exist_is_named_in_one_line(memfd):
    mapping = Mapping(memfd, 4 * PAGE, 4 * PAGE)
    assert "NUMA node 1000" in bind_to_node(mapping, 1000)
    for node in (-1, 1024, 10**9, 10**30):
        assert bind_to_node(mapping, node) == f"NUMA node {node}: expected 0 to 1023"


def test_on_another_system_the_error_says_what_to_use_instead(monkeypatch):
    monkeypatch.setattr(memfd_module.sys, "platform", "darwin")
    with pytest.raises(StartError, match=r"needs Linux .* this is darwin; use an anonymous region: .*'io: thread'"):
        require_linux()


def test_the_region_can_be_imported_where_linux_is_missing():
    code = (
        "import sys, os, ctypes, fcntl, selectors, socket, subprocess\n"
        "import kvtiers.api\n"  # the libraries below ours store which system they were installed for
        "sys.platform = 'darwin'\n"
        "for module, names in ((os, 'memfd_create MFD_CLOEXEC pidfd_open eventfd'), (fcntl, 'F_ADD_SEALS'),\n"
        "                      (socket, 'SO_PEERCRED MSG_CMSG_CLOEXEC')):\n"
        "    for name in names.split():\n"
        "        if hasattr(module, name):\n"
        "            delattr(module, name)\n"
        "from kvtiers.region.region import SharedOffloadRegion, AnonymousRegion\n"
        "from kvtiers.region.client import RegionJoin\n"
        "from kvtiers.layout.cache_layout import *\n"
        "from kvtiers.api import StartError\n"
        "cache = CacheLayout(ModelIdentity('m'), (KVGroup('g', 16),), (KVTensor('t', 0, 4096),))\n"
        "region = AnonymousRegion.create(cache, num_rows=4)\n"
        "join = RegionJoin.in_process(region, cache, 0)\n"
        "join.wait(1)\n"
        "join.view[5] = 1\n"
        "assert region.view[5] == 1\n"
        "for start in (lambda: SharedOffloadRegion.create('e', cache, 1 << 20),\n"
        "              lambda: RegionJoin.start('e', cache, 0).wait(60)):\n"
        "    try:\n"
        "        start()\n"
        "    except StartError as error:\n"
        "        assert 'needs Linux' in str(error), error\n"
        "    else:\n"
        "        raise SystemExit('it started')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("rank 0 of engine 'e': offloading stays off: a shared region needs Linux"), line
