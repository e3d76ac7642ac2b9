"""The diagnosis of the servers and their settings, for ``kvtiers check``."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from redis.exceptions import RedisError, ResponseError

from kvtiers.api import Finding
from kvtiers.api.units import format_size, parse_size
from kvtiers_redis.config import RedisConfig
from kvtiers_redis.servers import Server

__all__ = ["diagnose"]

_FEW_VALUES = 16
_GETEX_SINCE = (6, 2)
_CHECKED = ("maxmemory-policy", "proto-max-bulk-len", "client-query-buffer-limit", "client-output-buffer-limit",
            "save", "appendonly")  # fmt: skip

_Facts = Mapping[str, Any]


def diagnose(config: RedisConfig, servers: Sequence[Server], value_bytes: int, *, read_only: bool) -> Sequence[Finding]:
    """Return the findings about the connection to the servers, then about each of them."""
    local = all(server.is_local for server in servers)
    findings = [*_way(config, local=local)]
    for server in servers:
        try:
            info = server.client.info("everything")
        except (RedisError, OSError) as error:
            findings.append(_unknown(server, "INFO", "memory, limits and persistence", error))
            continue
        findings += _server(server.name, info, config, read_only=read_only)
        findings += _memory(server.name, info, value_bytes)
        settings = {
            "maxmemory-policy": info.get("maxmemory_policy", ""),
            "appendonly": "yes" if info.get("aof_enabled") else "no",
        }
        try:
            settings |= _settings(server)
        except (RedisError, OSError) as error:
            findings.append(_unknown(server, "CONFIG GET", "its limits and 'save'", error))
        findings += _policy(server.name, info, settings, config)
        findings += _limits(server.name, settings, value_bytes, config.window_bytes(local=local))
        findings += _persistence(server.name, info, settings)
    return findings


def _way(config: RedisConfig, *, local: bool) -> Iterator[Finding]:
    places = config.places
    if places.tls:
        checked = "certificate and host name are" if config.tls_check_hostname else "the certificate is"
        yield Finding("ok", f"TLS; {checked} checked")
    elif local:
        yield Finding("ok", "clear text, which stays on this machine")
    else:
        yield Finding("warning", "values travel in clear text to other machines", "use rediss:// and set tls_ca")


def _settings(server: Server) -> dict[str, str]:
    """Request one setting at a time, all in one pipeline: before Redis 7 CONFIG GET takes no more than one."""
    with server.client.pipeline(transaction=False) as pipe:
        for name in _CHECKED:
            pipe.config_get(name)
        return {str(name): text for found in pipe.execute() for name, text in found.items()}


def _unknown(server: Server, what: str, unchecked: str, error: Exception) -> Finding:
    if isinstance(error, ResponseError):
        return Finding("ok", f"{server.name}: {what} is not permitted, so {unchecked} were not checked ({error})")
    return Finding("error", f"{server.name} does not answer: {error}", "see that it runs and can be reached")


def _server(name: str, info: _Facts, config: RedisConfig, *, read_only: bool) -> Iterator[Finding]:
    version = str(info.get("valkey_version") or info.get("redis_version", "?"))
    kind = info.get("server_name", "redis")
    yield Finding(
        "ok", f"{name}: {kind} {version}, {info.get('role', '?')}, {info.get('connected_clients', '?')} clients"
    )
    if info.get("role") == "slave" and not read_only:
        yield Finding(
            "error", f"{name} is a replica, which takes no writes", "name its master, or set 'read_only: true'"
        )
    if info.get("cluster_enabled") and config.topology != "cluster":
        yield Finding("error", f"{name} is a node of a Cluster", "set 'topology: cluster'")
    compatible = tuple(int(part) for part in str(info.get("redis_version", "0")).split(".")[:2] if part.isdecimal())
    if config.refresh_ttl and compatible < _GETEX_SINCE:
        yield Finding(
            "error", f"{name}: 'refresh_ttl' needs GETEX, which {version} has not", "set 'refresh_ttl: false'"
        )


def _memory(name: str, info: _Facts, value_bytes: int) -> Iterator[Finding]:
    most, used = int(info.get("maxmemory", 0)), int(info.get("used_memory", 0))
    room = most - int(info.get("used_memory_startup", 0))
    if not most:
        yield Finding(
            "warning",
            f"{name}: no maxmemory: it grows until the machine has no memory left ({format_size(used)} used)",
            "CONFIG SET maxmemory to what the machine can spare, and maxmemory-policy allkeys-lru",
        )
    elif room < _FEW_VALUES * value_bytes:
        yield Finding(
            "warning",
            f"{name}: maxmemory {format_size(most)} has room for {max(0, room // value_bytes)} values of "
            f"{format_size(value_bytes)}",
            f"CONFIG SET maxmemory to many times {format_size(value_bytes)}",
        )
    else:
        yield Finding("ok", f"{name}: {format_size(used)} of {format_size(most)} used")


def _policy(name: str, info: _Facts, settings: _Facts, config: RedisConfig) -> Iterator[Finding]:
    policy = str(settings.get("maxmemory-policy", ""))
    evicts_nothing = policy == "noeviction" or (policy.startswith("volatile-") and config.ttl is None)
    if int(info.get("maxmemory", 0)) and evicts_nothing:
        why = "" if policy == "noeviction" else ", which evicts nothing that has no 'ttl'"
        yield Finding(
            "warning",
            f"{name}: maxmemory-policy {policy}{why}: once it is full, new values are dropped and old ones stay",
            "CONFIG SET maxmemory-policy allkeys-lru",
        )
    elif policy:
        yield Finding("ok", f"{name}: maxmemory-policy {policy}")


def _limits(name: str, settings: _Facts, value_bytes: int, window: int) -> Iterator[Finding]:
    for setting in ("proto-max-bulk-len", "client-query-buffer-limit"):
        limit = parse_size(settings[setting]) if setting in settings else value_bytes
        if limit < value_bytes:
            yield Finding(
                "error",
                f"{name}: {setting} {format_size(limit)} refuses values of {format_size(value_bytes)}",
                f"CONFIG SET {setting} {max(512 << 20, 2 * value_bytes)}",
            )
    need = max(window, value_bytes)
    words = str(settings.get("client-output-buffer-limit", "")).split()
    normal = words[words.index("normal") + 1 :][:3] if "normal" in words else []
    hard, soft = (parse_size(word) for word in normal[:2]) if len(normal) == 3 else (0, 0)
    if 0 < hard < 2 * need or 0 < soft <= need:
        yield Finding(
            "error" if 0 < hard <= value_bytes else "warning",
            f"{name}: client-output-buffer-limit normal {' '.join(normal)} closes connections that read "
            f"{format_size(need)} at a time",
            'CONFIG SET client-output-buffer-limit "normal 0 0 0", or a smaller window',
        )


def _persistence(name: str, info: _Facts, settings: _Facts) -> Iterator[Finding]:
    kept = [
        text
        for text, there in (
            (f"save {settings.get('save')!r}", settings.get("save")),
            ("appendonly yes", settings.get("appendonly") == "yes"),
        )
        if there
    ]
    if kept:
        yield Finding(
            "warning",
            f"{name}: {' and '.join(kept)}: saving gigabytes of values stalls it, and its fork can double its memory",
            'a cache needs neither: CONFIG SET save "", CONFIG SET appendonly no',
        )
    elif "save" in settings:
        yield Finding("ok", f"{name}: it writes nothing to its disk")
    if info.get("rdb_last_bgsave_status", "ok") != "ok" and settings.get("save") != "":
        yield Finding(
            "warning",
            f"{name}: its last save to disk failed; it may refuse writes until one succeeds",
            'make room on its disk, or CONFIG SET save ""',
        )
