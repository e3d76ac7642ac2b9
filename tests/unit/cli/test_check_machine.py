"""The doctor of the machine, on machines that are a tree of files."""

import resource
import socket
import sys
from pathlib import Path

import pytest
from tests.pool_rig import KeeperThread

from kvtiers.api import Finding, StartError
from kvtiers.cli.check.check_machine import examine
from kvtiers.cli.machine import Machine
from kvtiers.config import load_config
from kvtiers.pool.loan import clear_pool
from kvtiers.testing.running import open_descriptors

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path):
    """Return a function: files, and facts that are no file -> a machine with 64 GiB available, but for those."""

    def build(files: dict[str, str] | None = None, **facts) -> Machine:
        tree = {
            "proc/meminfo": f"MemTotal: {128 * GIB // 1024} kB\nMemAvailable: {64 * GIB // 1024} kB\n",
            "proc/sys/kernel/osrelease": "6.1.0-13-amd64\n",
            "sys/devices/system/node/node0/numastat": "",
            "sys/devices/system/node/node1/numastat": "",
            **(files or {}),
        }
        for path, text in tree.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        defaults = {
            "system": "linux",
            "limit": lambda which: unlimited,
            "try_memfd": lambda huge_pages: None,
        }
        return Machine(root=tmp_path, **{**defaults, **facts})

    return build


def config(capacity: str = "1GiB", tiers: tuple[dict, ...] = (), **primary):
    return load_config({"version": 1, "primary": {"capacity": capacity, **primary}, "secondary": list(tiers)})


def bad(findings: list[Finding]) -> list[Finding]:
    assert all(finding.fix for finding in findings if finding.level != "ok")
    return [finding for finding in findings if finding.level != "ok"]


def limits(**soft_and_hard: tuple[int, int]):
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    return lambda which: {getattr(resource, f"RLIMIT_{n}"): v for n, v in soft_and_hard.items()}.get(which, unlimited)


def test_a_machine_that_has_everything_is_well(machine):
    findings = examine(config(numa_node=1), machine())
    assert bad(findings) == []
    text = "\n".join(finding.text for finding in findings)
    for word in ("available memory 64GiB", "kernel 6.1", "memfd", "NUMA node 1", "open files"):
        assert word in text


def test_where_another_policy_would_pay_and_which_prompts_exceed_the_budgets_is_said(machine):
    tier = {"type": "memory", "capacity": "1GiB"}
    text = "\n".join(finding.text for finding in examine(config("100GiB", (tier,)), machine()))
    (lru,) = (line for line in text.splitlines() if line.startswith("eviction: lru"))
    assert "'turn-hazard' (kvtiers-policies) may hit more where the primary is small" in lru
    assert "'kvtiers plan --trace' says it of your recorded requests" in lru
    assert len(lru) < 160
    assert (
        "budgets: 25GiB of the primary for each tier's transfers, 50GiB for all tiers together; prompts with more"
        in text
    )
    learning = "\n".join(finding.text for finding in examine(config(eviction="turn-hazard"), machine()))
    assert "turn-hazard" not in learning
    assert "budgets: " not in learning, "no tier pins anything"


def test_more_capacity_than_available_memory_is_an_error(machine):
    (finding,) = bad(examine(config("65GiB"), machine()))
    assert finding.level == "error"
    assert "65GiB" in finding.text
    assert "64GiB available" in finding.text
    assert "lower primary.capacity" in finding.fix


@pytest.mark.parametrize(
    ("primary", "said"),
    [
        (
            {"prefault_window": "16GiB"},
            "prefault: ahead: 16GiB of memory at the start, and as much ahead of use, up to 32GiB",
        ),
        ({"prefault_window": "64GiB"}, "prefault: ahead: 32GiB of memory at the start"),
        ({"prefault": "all"}, "the start waits until 32GiB are populated, and pinned for each GPU"),
        ({"prefault": "off"}, "memory is taken at its first use, up to 32GiB"),
    ],
)
def test_it_says_when_memory_is_taken(machine, primary, said):
    (finding,) = [found for found in examine(config("32GiB", **primary), machine()) if "prefault" in found.text]
    assert finding.level == "ok"
    assert said in finding.text


@pytest.mark.parametrize(
    ("release", "setting", "said"),
    [
        ("6.1.0", "always within_size advise [never] deny force", "in huge pages, where the kernel finds any"),
        ("5.15.0", "always within_size advise [never] deny force", "echo advise > /sys/kernel/mm/transparent_hugepage"),
        ("5.15.0", "always within_size [advise] never deny force", "in huge pages, where the kernel finds any"),
        ("6.1.0", "always within_size advise never [deny] force", "shared memory gets no huge pages"),
    ],
)
def test_it_says_whether_shared_memory_is_in_huge_pages(machine, release, setting, said):
    files = {
        "proc/sys/kernel/osrelease": f"{release}-13-amd64\n",
        "sys/kernel/mm/transparent_hugepage/shmem_enabled": f"{setting}\n",
    }
    assert said in "\n".join(found.text for found in examine(config(), machine(files)))


CGROUP_V2 = {
    "proc/self/cgroup": "0::/pod/engine\n",
    "proc/self/mountinfo": "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
    "sys/fs/cgroup/pod/memory.max": f"{8 * GIB}\n",
    "sys/fs/cgroup/pod/memory.current": f"{5 * GIB}\n",
    "sys/fs/cgroup/pod/memory.stat": f"inactive_file {GIB}\nactive_file 0\n",
    "sys/fs/cgroup/pod/engine/memory.max": "max\n",
    "sys/fs/cgroup/pod/engine/memory.current": f"{GIB}\n",
}
CGROUP_V1 = {
    "proc/self/cgroup": "4:cpu,memory:/pod\n",
    "proc/self/mountinfo": "30 20 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
    "sys/fs/cgroup/memory/pod/memory.limit_in_bytes": f"{8 * GIB}\n",
    "sys/fs/cgroup/memory/pod/memory.usage_in_bytes": f"{5 * GIB}\n",
    "sys/fs/cgroup/memory/pod/memory.stat": f"total_inactive_file {GIB}\ntotal_active_file 0\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
}


@pytest.mark.parametrize("files", [CGROUP_V2, CGROUP_V1], ids=["v2", "v1"])
def test_the_control_groups_limit_counts_without_its_file_cache(machine, files):
    assert bad(examine(config("3GiB"), machine(files))) == []
    (finding,) = bad(examine(config("5GiB"), machine(files)))
    assert finding.level == "error"
    assert "/pod 4GiB (limit 8GiB, 4GiB in use)" in finding.text


def test_huge_pages_that_are_reserved_are_well_whatever_other_memory_is_there(machine):
    files = {
        "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "100000\n",
        "sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages": "0\n",
    }
    findings = examine(config("100GiB", huge_pages="2MiB"), machine(files))
    assert bad(findings) == []
    assert "capacity needs 51200 huge pages of 2MiB, 100000 are free" in [finding.text for finding in findings]


def test_too_few_huge_pages_are_an_error_with_the_number_to_add(machine):
    files = {
        "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "512\n",
        "sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages": "12\n",
    }
    (finding,) = bad(examine(config("1025MiB", huge_pages="2MiB"), machine(files)))
    assert finding.text == "capacity needs 513 huge pages of 2MiB, 500 are free"
    assert "hugepages-2048kB/nr_hugepages by 13" in finding.fix


def test_a_size_of_huge_pages_that_the_kernel_has_not_is_an_error(machine):
    (finding,) = bad(examine(config(huge_pages="1GiB"), machine()))
    assert (finding.level, finding.text) == ("error", "this kernel has no huge pages of 1GiB")


def test_a_numa_node_that_is_not_there_is_an_error(machine):
    (finding,) = bad(examine(config(numa_node=2), machine()))
    assert (finding.level, finding.text) == ("error", "there is no NUMA node 2; nodes: 0, 1")


@pytest.mark.parametrize(
    ("release", "well"), [("5.14.0", True), ("6.0", True), ("5.13.19-generic", False), ("4.18", False)]
)
def test_a_kernel_without_populate_write_is_a_warning(machine, release, well):
    findings = bad(examine(config(), machine({"proc/sys/kernel/osrelease": release})))
    assert [finding.level for finding in findings] == ([] if well else ["warning"])


def test_a_kernel_that_does_not_say_its_version_is_a_warning(machine):
    (finding,) = bad(examine(config(), machine({"proc/sys/kernel/osrelease": ""})))
    assert finding.level == "warning"


def test_memfd_that_is_forbidden_is_an_error(machine):
    def refused(huge_pages):
        raise StartError("memfd_create failed: Operation not permitted")

    (finding,) = bad(examine(config(), machine(try_memfd=refused)))
    assert (finding.level, finding.text) == ("error", "memfd_create failed: Operation not permitted")


def test_a_limit_of_locked_memory_is_left_to_the_tiers_that_lock_any(machine):
    few = limits(MEMLOCK=(8 << 20, 8 << 20))
    assert bad(examine(config(), machine(limit=few))) == []


def test_too_few_descriptors_are_an_error_with_the_number(machine, distributions):
    distributions.tier("shelf")
    tiers = ({"type": "shelf", "threads": 100}, {"type": "shelf", "name": "b", "threads": 100})
    (finding,) = bad(examine(config(tiers=tiers), machine(limit=limits(NOFILE=(256, 4096)))))
    assert (finding.level, finding.fix) == ("error", "ulimit -n 896")
    (finding,) = bad(examine(config(tiers=tiers), machine(limit=limits(NOFILE=(256, 256)))))
    assert finding.fix == "as root, raise the hard limit (256)"
    assert bad(examine(config(), machine(limit=limits(NOFILE=(256, 256))))) == []


def sysconf(name: str) -> int:
    return {"SC_PHYS_PAGES": 4 << 20, "SC_PAGE_SIZE": 4096}[name]


def test_on_macos_one_line_says_what_does_not_apply(machine, distributions):
    distributions.tier("shelf")
    findings = examine(config(tiers=({"type": "shelf", "io": "thread"},)), machine(system="darwin", sysconf=sysconf))
    assert bad(findings) == []
    assert findings[0].text.startswith("darwin, not Linux: shared region, control groups, huge pages, NUMA ")
    assert findings[1].text == "capacity 1GiB of 16GiB of memory"


def test_on_macos_a_store_meant_for_a_tier_host_is_a_warning_and_too_much_capacity_an_error(machine, distributions):
    distributions.tier("shelf")
    distributions.tier("peers", kind="manager")
    mac = machine(system="darwin", sysconf=sysconf)
    process, memory = bad(examine(config("17GiB", tiers=({"type": "shelf"}, {"type": "peers"})), mac))
    assert process.level == "warning"  # it runs: see test_runtime.py
    assert process.text.endswith("run on threads of the engine's process: shelf")
    assert (memory.level, memory.text) == ("error", "capacity is 17GiB, the machine has 16GiB of memory")


def test_this_machine_can_be_examined():
    findings = examine(config("4KiB"), Machine())
    assert len(findings) >= 5
    assert all(finding.level == "ok" or finding.fix for finding in findings)


def test_a_real_memfd_is_tried_and_closed():
    before = open_descriptors()
    Machine().try_memfd("off")
    assert open_descriptors() <= before


@pytest.mark.parametrize(("capacity", "chunks"), [("4KiB", 0), ("200KiB", 1), ("767KiB", 3)])
def test_a_primary_of_less_than_a_few_chunks_of_a_small_model_is_a_warning_with_the_sum(machine, capacity, chunks):
    [finding] = bad(examine(config(capacity), machine()))
    assert finding.level == "warning"
    assert f"holds {chunks} chunks of a model as small as Qwen2.5-0.5B" in finding.text
    assert "2 x 24 layers x 2 heads x 64 x 2 bytes x 16 tokens = 192KiB" in finding.text
    assert "primary.capacity" in finding.fix


def test_a_primary_of_a_few_chunks_is_none(machine):
    assert bad(examine(config("768KiB"), machine())) == []


def traced(**tracing):
    return load_config({"version": 1, "primary": {"capacity": "1GiB"}, "tracing": tracing})


def test_tracing_whose_receiver_is_there_is_well(machine):
    with socket.create_server(("127.0.0.1", 0)) as receiver:
        url = f"http://127.0.0.1:{receiver.getsockname()[1]}/v1/traces"
        findings = examine(traced(sample=0.01, endpoint=url), machine())
    assert bad(findings) == []
    assert "tracing: 1 % of the requests without a trace context are in the sample" in {f.text for f in findings}


def test_a_receiver_of_spans_that_cannot_be_reached_is_a_warning(machine):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1/traces"
    (finding,) = bad(examine(traced(endpoint=url), machine()))
    assert finding.level == "warning"
    assert finding.text.startswith(f"tracing: {url} cannot be reached (")


def test_tracing_without_the_extra_is_an_error(machine, monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    (finding,) = bad(examine(traced(), machine()))
    assert finding.level == "error"
    assert finding.fix == "pip install 'kvtiers[otel]', or remove 'tracing'"


def test_a_recording_is_tried_before_the_first_request_has_ended(machine, tmp_path):
    def examined(path: Path) -> list[Finding]:
        data = {"version": 1, "primary": {"capacity": "1GiB"}, "record": {"path": str(path)}}
        return [finding for finding in examine(load_config(data), machine()) if finding.text.startswith("record: ")]

    assert [finding.level for finding in examined(tmp_path / "trace.jsonl")] == ["ok"]
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "none", tmp_path / "file"):
        (finding,) = examined(folder / "trace.jsonl")
        assert finding.level == "warning"
        assert finding.text == f"record: {folder} is no folder; the engine runs, and nothing is recorded"


def test_a_pool_that_is_to_be_had_is_named_and_one_that_is_not_with_the_reason(machine, tmp_path):
    path = tmp_path / "pool.sock"
    (finding,) = bad(examine(config(pool=str(path)), machine()))
    assert (finding.level, finding.text.partition(": No such")[0]) == ("warning", f"pool: no keeper serves at {path}")
    assert "of its own, and a restart is cold" in finding.text
    assert finding.fix == f"start one: kvtiers pool serve --size SIZE --socket {path}"
    KeeperThread(path, 1 << 20)
    findings = examine(config(pool=str(path)), machine())
    assert Finding("ok", f"pool: 1MiB at {path}, 0 chunks; no engine has it") in findings
    assert not bad(findings)


def test_a_pool_of_another_format_is_none_that_is_to_be_had(machine, tmp_path, monkeypatch):
    KeeperThread(tmp_path / "pool.sock", 1 << 20)
    monkeypatch.setattr("kvtiers.pool.keeper.POOL_FORMAT", 99)
    (finding,) = bad(examine(config(pool=str(tmp_path / "pool.sock")), machine()))
    with pytest.raises(StartError, match="the keeper's is 99; run the same kvtiers in both"):
        clear_pool(str(tmp_path / "pool.sock"))
    assert finding.text.startswith("pool: format 3 is asked for, the keeper's is 99: the engine has ")
    assert finding.fix == "run the same kvtiers in both"


def test_what_an_engine_without_its_pool_lacks_and_what_a_pool_ignores_are_warnings(machine, tmp_path):
    KeeperThread(tmp_path / "pool.sock", 1 << 20)
    wanted = config(pool=str(tmp_path / "pool.sock"), capacity="100TiB", numa_node=0)
    found = [finding.text for finding in bad(examine(wanted, machine())) if finding.level == "warning"]
    assert "numa_node does nothing with a pool" in found
    assert [text for text in found if text.startswith("without the pool the engine does not start: 100TiB of memory")]
