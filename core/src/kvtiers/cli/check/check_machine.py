"""The machine check: finds out whether this config will run here, and what to do if not.

Each check yields findings: ok, a warning (it runs, but worse) or an error (it does not run), each with its fix.
"""

import contextlib
import os
import resource
import socket
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

from kvtiers.api import ConfigError, Finding, StartError
from kvtiers.api.units import format_size
from kvtiers.cli.machine import Machine
from kvtiers.config import OffloadConfig
from kvtiers.layout.cache_layout import VALUE_ALIGN
from kvtiers.plugins import load_tier
from kvtiers.pool.loan import pool_figures
from kvtiers.region.handshake import process_name
from kvtiers.region.limits import available_memory, cgroup_limit, free_huge_pages, memory_problem, read_text
from kvtiers.region.memfd import HUGE_PAGE_BYTES
from kvtiers.tracing.span_writer import otlp_exporter

__all__ = ["examine"]

_COLLAPSE = (6, 1)  # MADV_COLLAPSE makes huge pages of shared memory, whatever the setting
_POPULATE_SINCE = (5, 14)
_FEW_CHUNKS = 4
# Keys and values (2) of 24 layers, 2 KV heads, 64 numbers of 2 bytes, for 16 tokens: Qwen2.5-0.5B, whose config.json
# says so; models of use have more.
_SMALL_CHUNK = 2 * 24 * 2 * 64 * 2 * 16
_SUM = f"2 x 24 layers x 2 heads x 64 x 2 bytes x 16 tokens = {format_size(_SMALL_CHUNK)}"
_CONNECT_SECONDS = 2.0
_UNLIMITED = resource.RLIM_INFINITY


def examine(config: OffloadConfig, machine: Machine) -> list[Finding]:
    """Return the findings about this machine and this config, the most important first."""
    checks = [
        _platform,
        _pool,
        _capacity,
        _memory,
        _growth,
        _numa,
        _kernel,
        _memfd,
        _descriptors,
        _eviction,
        _budgets,
        _recording,
        _tracing,
    ]
    return [finding for check in checks for finding in check(config, machine)]


def _platform(config: OffloadConfig, machine: Machine) -> Iterator[Finding]:
    if machine.is_linux:
        return
    yield Finding(
        "ok",
        f"{machine.system}, not Linux: shared region, control groups, huge pages, NUMA and MADV_POPULATE_WRITE do not "
        "apply; ranks run in the engine's process, over an anonymous region",
    )
    # A tier manager runs in the engine's process, with any 'io'.
    stores = [tier for tier in config.secondary if load_tier(tier.type).kind == "store"]
    hosts = [tier.tier_name for tier in stores if tier.io == "process"]
    if hosts:
        names = ", ".join(hosts)
        yield Finding(
            "warning",
            f"'io: process' needs Linux: these tiers run on threads of the engine's process: {names}",
            "write 'io: thread' in them",
        )


def _pool(config: OffloadConfig, machine: Machine) -> Iterator[Finding]:
    path = config.primary.pool
    if path is None or not machine.is_linux:
        return
    try:
        figures = pool_figures(path)
    except StartError as error:
        text, _, fix = str(error).rpartition("; ")
        own = format_size(config.primary.capacity)
        text = f"pool: {text or fix}: the engine has {own} of its own, and a restart is cold"
        yield Finding("warning", text, fix if text else "")
        return
    holders = [process_name(part["engine"]) for part in figures["parts"] if part["lent"]]
    has = f"{', '.join(holders) or 'no engine'} {'have' if len(holders) > 1 else 'has'} it"
    yield Finding("ok", f"pool: {format_size(figures['bytes'])} at {path}, {figures['chunks']} chunks; {has}")
    if config.primary.numa_node is not None:
        yield Finding(
            "warning", "numa_node does nothing with a pool", f"give the keeper --numa-node {config.primary.numa_node}"
        )
    if len(holders) < len(figures["parts"]) and (problem := memory_problem(config.primary.capacity, machine.root)):
        text, _, fix = problem.partition("; ")
        yield Finding("warning", f"without the pool the engine does not start: {text}", fix)


def _capacity(config: OffloadConfig, machine: Machine) -> Iterator[Finding]:  # noqa: ARG001 -- a check like the others
    capacity = config.primary.capacity
    if VALUE_ALIGN <= capacity < _FEW_CHUNKS * _SMALL_CHUNK:  # below it is an error of the config's
        yield Finding(
            "warning",
            f"a capacity of {format_size(capacity)} holds {capacity // _SMALL_CHUNK} chunks of a model as small as "
            f"Qwen2.5-0.5B: one has {_SUM}",
            "raise primary.capacity, best to some GiB; 'kvtiers size' computes what a model needs",
        )


def _eviction(config: OffloadConfig, machine: Machine) -> Iterator[Finding]:  # noqa: ARG001 -- a check like the others
    if config.primary.eviction == "lru":
        yield Finding(
            "ok",
            "eviction: lru; 'turn-hazard' (kvtiers-policies) may hit more where the primary is small: 'kvtiers plan "
            "--trace' says it of your recorded requests",
        )


def _budgets(config: OffloadConfig, machine: Machine) -> Iterator[Finding]:  # noqa: ARG001 -- a check like the others
    if not config.secondary:
        return
    capacity, budgets = config.primary.capacity, config.budgets
    one, every = (format_size(int(capacity * share)) for share in (budgets.one_tier, budgets.all_tiers))
    yield Finding(
        "ok",
        f"budgets: {one} of the primary for each tier's transfers, {every} for all tiers together; prompts with more "
        "KV lose hits, and 'kvtiers plan', 'kvtiers replay' and 'kvtiers status' name the budget then",
    )


def _recording(config: OffloadConfig, machine: Machine) -> Iterator[Finding]:  # noqa: ARG001 -- as the others
    if config.record is None:
        return
    folder = Path(config.record.path).absolute().parent
    if os.access(folder, os.W_OK | os.X_OK):
        yield Finding("ok", f"record: a file can be made in {folder}")
    else:
        why = "cannot be written to by this user" if folder.is_dir() else "is no folder"
        yield Finding(
            "warning",
            f"record: {folder} {why}; the engine runs, and nothing is recorded",
            "make the folder for the engine's user, or mend 'record.path'",
        )


def _tracing(config: OffloadConfig, machine: Machine) -> Iterator[Finding]:  # noqa: ARG001 -- a check like the others
    if config.tracing is None:
        return
    try:
        otlp_exporter(config.tracing.endpoint).shutdown()
    except ConfigError as error:
        text, _, fix = str(error).rpartition(": ")
        yield Finding("error", text, fix)
        return
    if (endpoint := config.tracing.endpoint) is not None:
        url = urllib.parse.urlsplit(endpoint)
        try:
            place = (url.hostname or "", url.port or (443 if url.scheme == "https" else 80))
            socket.create_connection(place, _CONNECT_SECONDS).close()
        except (OSError, ValueError) as error:
            yield Finding(
                "warning",
                f"tracing: {endpoint} cannot be reached ({error}); the engine runs, and its spans are lost",
                "start the receiver, or mend 'tracing.endpoint'",
            )
            return
    yield Finding(
        "ok", f"tracing: {100 * config.tracing.sample:g} % of the requests without a trace context are in the sample"
    )


def _memory(config: OffloadConfig, machine: Machine) -> Iterator[Finding]:
    capacity = config.primary.capacity
    if config.primary.pool is not None and machine.is_linux:
        with contextlib.suppress(StartError):
            if not all(part["lent"] for part in pool_figures(config.primary.pool)["parts"]):
                return  # the pool has it already
    if not machine.is_linux:
        total = machine.total_memory()
        if total is not None and capacity > total:
            yield Finding(
                "error",
                f"capacity is {format_size(capacity)}, the machine has {format_size(total)} of memory",
                "lower primary.capacity",
            )
        elif total is not None:
            yield Finding("ok", f"capacity {format_size(capacity)} of {format_size(total)} of memory")
        return
    if config.primary.huge_pages != "off":
        yield from _huge_pages(config, machine)
        return
    if problem := memory_problem(capacity, machine.root):
        text, _, fix = problem.partition("; ")
        yield Finding("error", text, fix)
        return
    available, group = available_memory(machine.root), cgroup_limit(machine.root)
    has = "unknown" if available is None else format_size(available)
    left = f"; control group {group.path}: {format_size(group.headroom)} left" if group else "; no control group limit"
    yield Finding("ok", f"capacity {format_size(capacity)}, available memory {has}{left}")


def _growth(config: OffloadConfig, machine: Machine) -> Iterator[Finding]:
    if not machine.is_linux:
        return
    primary = config.primary
    capacity, window = format_size(primary.capacity), format_size(min(primary.prefault_window, primary.capacity))
    text = {
        "ahead": f"prefault: ahead: {window} of memory at the start, and as much ahead of use, up to {capacity}",
        "all": f"prefault: all: the start waits until {capacity} are populated, and pinned for each GPU",
        "off": f"prefault: off: memory is taken at its first use, up to {capacity}; that use is slower",
    }[primary.prefault]
    if primary.huge_pages == "off":
        text += f"; {_transparent(machine)}"
    yield Finding("ok", text)


def _transparent(machine: Machine) -> str:
    path = machine.root / "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    setting = next((word.strip("[]") for word in read_text(path).split() if word.startswith("[")), "deny")
    if setting == "deny":
        return f"shared memory gets no huge pages: {path.relative_to(machine.root)} says deny, or is not there"
    version = machine.kernel()
    if setting == "never" and (version is None or version < _COLLAPSE):
        how = f"as root, echo advise > /{path.relative_to(machine.root)}"
        return f"before Linux {_COLLAPSE[0]}.{_COLLAPSE[1]} shared memory gets no huge pages ({how})"
    return "in huge pages, where the kernel finds any"


def _huge_pages(config: OffloadConfig, machine: Machine) -> Iterator[Finding]:
    size = config.primary.huge_pages
    page = HUGE_PAGE_BYTES[size]
    need = -(-config.primary.capacity // page)
    free = free_huge_pages(page, machine.root)
    pool = f"/sys/kernel/mm/hugepages/hugepages-{page // 1024}kB/nr_hugepages"
    if free is None:
        yield Finding("error", f"this kernel has no huge pages of {size}", "write 'huge_pages: off', or another size")
    elif free < need:
        yield Finding(
            "error",
            f"capacity needs {need} huge pages of {size}, {free} are free",
            f"as root, raise the number in {pool} by {need - free}, or write 'huge_pages: off'",
        )
    else:
        yield Finding("ok", f"capacity needs {need} huge pages of {size}, {free} are free")


def _numa(config: OffloadConfig, machine: Machine) -> Iterator[Finding]:
    node, nodes = config.primary.numa_node, machine.numa_nodes()
    if node is None or not machine.is_linux:
        return
    if node in nodes:
        yield Finding("ok", f"NUMA node {node} is there")
    else:
        names = ", ".join(map(str, nodes)) or "none that the kernel names"
        yield Finding("error", f"there is no NUMA node {node}; nodes: {names}", "correct or remove primary.numa_node")


def _kernel(config: OffloadConfig, machine: Machine) -> Iterator[Finding]:  # noqa: ARG001 -- a check like the others
    if not machine.is_linux:
        return
    version = machine.kernel()
    if version is None:
        yield Finding(
            "warning", "the kernel's version is unknown: /proc/sys/kernel/osrelease says nothing", "mount /proc"
        )
    elif version < _POPULATE_SINCE:
        yield Finding(
            "warning",
            f"kernel {version[0]}.{version[1]} has no MADV_POPULATE_WRITE (5.14 has): pre-fault touches page by page",
            "a newer kernel starts faster; nothing else changes",
        )
    else:
        yield Finding("ok", f"kernel {version[0]}.{version[1]} has MADV_POPULATE_WRITE")


def _memfd(config: OffloadConfig, machine: Machine) -> Iterator[Finding]:
    if not machine.is_linux:
        return
    try:
        machine.try_memfd(config.primary.huge_pages)
    except (StartError, OSError) as error:
        yield Finding("error", str(error), "allow what is refused, as in the container's seccomp profile or its limits")
    else:
        yield Finding("ok", "memfd_create works: the region needs no space in /dev/shm")


def _descriptors(config: OffloadConfig, machine: Machine) -> Iterator[Finding]:
    # For each tier: a socket pair, a pidfd, log pipes; with 'io: thread' also its connections, some per thread.
    need = 64 + sum(16 + 4 * tier.threads for tier in config.secondary)
    soft, hard = machine.limit(resource.RLIMIT_NOFILE)
    if soft == _UNLIMITED or soft >= need:
        count = "unlimited" if soft == _UNLIMITED else str(soft)
        yield Finding("ok", f"open files: {count}, about {need} are needed")
    else:
        how = f"ulimit -n {need}" if hard == _UNLIMITED or hard >= need else f"as root, raise the hard limit ({hard})"
        yield Finding("error", f"open files are limited to {soft}, about {need} are needed", how)
