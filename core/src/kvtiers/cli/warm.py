"""``kvtiers warm``: fills the primaries of running engines from a tier, over their control sockets.

The command reads the keys and gives them to each engine a few at a time, as it takes them; the engine loads them behind
the loads of its requests. An engine that hears nothing for a while stops: so it also ends when this process is killed.
"""

import importlib
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import click

from kvtiers.api import ConfigError, KvtiersError
from kvtiers.api.keys import OffloadKey, make_offload_key, with_tenant
from kvtiers.api.units import format_size, parse_size
from kvtiers.cli.engines import NO_COMMANDS, meant
from kvtiers.cli.output import value_bytes_option, with_unit
from kvtiers.cli.progress import Report, show_progress, stop_on_interrupt
from kvtiers.cli.store.inventory import Selection, modified
from kvtiers.cli.store.session import open_session
from kvtiers.control import CommandRefused, send_command
from kvtiers.layout.storage_name import ParsedName, parse_name

__all__ = ["warm"]

_LINE_BYTES = 48_000  # of keys in one command: its line has at most 65,536
_MOST_KEYS = 1024  # in one command
_LONGEST_KEY = 4096  # digits
_PAUSE_SECONDS = 0.05  # until an engine is asked again that takes no keys now
_LOOK_SECONDS = 0.2  # between two looks how far it is
_ENDS_WELL = {"done", "the primary is full", "as much as was asked for is loaded"}
_ENGINE, _INTERRUPTED = 1, 130

Prefixes = list[list[OffloadKey]]
Send = Callable[..., dict[str, Any]]


class _Batch(NamedTuple):
    """The keys of one command. ``continues``: the last prefix goes on in the next one."""

    prefixes: Prefixes
    continues: bool
    is_last: bool


def _rate(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    return with_unit(parse_size)(ctx, param, None if value is None else value.removesuffix("/s"))  # type: ignore[no-any-return]


@click.command(
    epilog="""\b
Examples:
  kvtiers warm --from far --keys keys.txt --rate 500MiB/s
  kvtiers warm --from fs --config tiers.yaml            what its store has of this engine, the newest first
  kvtiers warm --from far --keys keys.txt --all         all engines that run here, at the same time

A file of keys has one a line, in hexadecimal digits or as a name that 'kvtiers store ls' shows, the head of a prefix
first; an empty line ends a prefix, '#' begins a comment. What the engine's requests load comes first, and nothing is
evicted: free rows alone are filled, but for those that 'budgets.store_reserve' keeps for stores. Ctrl-C ends it, and
what was loaded stays. Exit status: 0 done or the primary is full, 1 an engine has refused it or ended it, 2 the command
line or a file is wrong, 130 ended by Ctrl-C."""
)
@click.option("--from", "tier", required=True, metavar="TIER", help="The tier to load from, by its name.")
@click.option("--keys", "keys_file", metavar="FILE", type=click.Path(), help="A file of keys, the most useful first.")
@click.option("--trace", metavar="FILE", type=click.Path(), help="A trace, for engines of 'kvtiers replay'.")
@click.option("--config", metavar="FILE", type=click.Path(), help="The tiers: takes what the store lists.")
@click.option("--rate", metavar="SIZE", callback=_rate, help="Most bytes a second of each engine, such as 500MiB/s.")
@click.option("--most", metavar="SIZE", callback=with_unit(parse_size), help="Most bytes for each engine to load.")
@click.option("--engine", "pid", type=int, metavar="PID", help="Which engine, if several run here.")
@click.option("--all", "to_all", is_flag=True, help="Warm all engines that run here, at the same time.")
@click.option(
    "--timeout",
    "seconds",
    type=click.FloatRange(0, 3600),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for each answer of an engine.",
)
@value_bytes_option("With --config: the size of the memory for one value that the tier is opened with.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list, one object an engine.")
@click.pass_context
def warm(
    ctx: click.Context,
    tier: str,
    keys_file: str | None,
    trace: str | None,
    config: str | None,
    rate: float | None,
    most: int | None,
    pid: int | None,
    to_all: bool,
    seconds: float,
    value_bytes: int,
    as_json: bool,
) -> None:
    """Fill the CPU memory of a running engine from TIER, ahead of its requests."""
    if sum(source is not None for source in (keys_file, trace, config)) != 1:
        raise click.UsageError("give one of --keys, --trace and --config")
    prefixes_of = _source(tier, keys_file, trace, config, value_bytes)
    engines = meant(pid, to_all=to_all)
    with stop_on_interrupt() as stop, show_progress() as report, ThreadPoolExecutor(len(engines)) as pool:
        run = partial(_warm, tier=tier, limits=(rate, most), seconds=seconds, source=prefixes_of, stop=stop)
        shown = report if len(engines) == 1 else _silent
        runs = [pool.submit(run, engine, report=shown) for engine in engines]
        answers = [one.result() for one in runs]
    if as_json:
        click.echo(json.dumps(answers))
    else:
        for answer in answers:
            which = f"process {answer['pid']}: " if len(answers) > 1 else ""
            click.echo(f"{'error: ' if 'error' in answer else ''}{which}{answer.get('error') or _said(answer, tier)}")
    if stop.is_set():
        ctx.exit(_INTERRUPTED)
    ctx.exit(0 if all(answer.get("ended") in _ENDS_WELL for answer in answers) else _ENGINE)


def _silent(_text: Callable[[], str]) -> None:
    """Show nothing: several engines would overwrite each other's line."""


def _warm(
    engine: dict[str, Any],
    *,
    tier: str,
    limits: tuple[float | None, int | None],
    seconds: float,
    source: Callable[[dict[str, Any]], Prefixes],
    stop: Event,
    report: Report,
) -> dict[str, Any]:
    """Warm one engine; return its last figures, or ``error``."""
    answer = {"engine": engine["engine"], "pid": engine["pid"]}
    if not engine.get("control"):
        return {**answer, "error": f"{engine['engine']} {NO_COMMANDS}"}

    def send(action: str, **arguments: Any) -> dict[str, Any]:
        return send_command(engine["control"], action, seconds, engine["uid"], **arguments)[1]

    began = time.monotonic()
    try:
        begun = send("warm", tier=tier, bytes_per_second=limits[0], most_bytes=limits[1])
        try:
            prefixes = source(begun)
            _give(send, begun["id"], _batches(prefixes), stop, report)
        finally:
            done = send("warm-end", id=begun["id"])
    except KvtiersError as problem:
        return {**answer, "error": str(problem)}
    done["keys"] = sum(map(len, prefixes))
    return {**answer, **done, "seconds": round(time.monotonic() - began, 3)}


def _give(send: Send, number: int, batches: Iterator[_Batch], stop: Event, report: Report) -> None:
    """Give an engine keys as it takes them, then wait until it has loaded what it can."""
    batch: _Batch | None = next(batches)
    while not stop.is_set():
        some = batch or _Batch([], continues=False, is_last=False)
        done = send(
            "warm-keys",
            id=number,
            prefixes=[[key.hex() for key in keys] for keys in some.prefixes],
            continues=some.continues,
            last=some.is_last,
        )
        report(partial(_so_far, done))
        if done["ended"]:
            return
        if batch is None:
            stop.wait(_LOOK_SECONDS)
        elif done["taken"] or not any(some.prefixes):
            batch = next(batches, None)
        else:
            stop.wait(_PAUSE_SECONDS)


def _so_far(done: dict[str, Any]) -> str:
    loaded = f"{done['loaded']} chunks, {format_size(done['loaded_bytes'])} loaded"
    return f"{loaded}; it waits for {done['waits_for']}" if "waits_for" in done else loaded


def _batches(prefixes: Prefixes) -> Iterator[_Batch]:
    """Yield the keys in portions of one command each."""
    portion: Prefixes = []
    keys = nbytes = 0
    for prefix in prefixes:
        portion.append([])
        for key in prefix:
            if keys == _MOST_KEYS or nbytes + 2 * len(key) + 6 > _LINE_BYTES:
                yield _Batch(portion, continues=bool(portion[-1]), is_last=False)
                portion, keys, nbytes = [[]], 0, 0
            portion[-1].append(key)
            keys += 1
            nbytes += 2 * len(key) + 6
        nbytes += 6
    yield _Batch(portion, continues=False, is_last=True)


def _said(done: dict[str, Any], tier: str) -> str:
    seconds, nbytes = done["seconds"], done["loaded_bytes"]
    speed = f" in {seconds:.1f} s, {format_size(int(nbytes / seconds))} a second" if seconds > 0 else ""
    left = done["keys"] - done["loaded"] - done["resident"] - done["missing"] - done["failed"]
    untried = f"; {left} keys were left" if left > 0 else ""
    return (
        f"{done['loaded']} of {done['keys']} chunks loaded, {format_size(nbytes)}{speed}; {done['resident']} were in "
        f"memory, {done['missing']} are not in {tier}, {done['failed']} failed; {done['ended']}{untried}"
    )


# -- where the keys come from


def _source(
    tier: str, keys_file: str | None, trace: str | None, config: str | None, value_bytes: int
) -> Callable[[dict[str, Any]], Prefixes]:
    """Return what returns the keys for an engine, by the answer with which its warm-up has begun."""
    if keys_file is not None:
        prefixes = _read_keys(keys_file)
        return lambda _begun: prefixes
    if trace is not None:
        runs, tokens = _read_trace(trace)
        return lambda begun: _of_trace(trace, runs, tokens, begun["tokens_per_chunk"][0])
    assert config is not None
    listed = _listed(config, tier, value_bytes)
    return lambda begun: _of_fingerprint(listed, tier, begun["fingerprint"])


def _read_keys(path: str) -> Prefixes:
    prefixes: Prefixes = [[]]
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            if not line.strip() and prefixes[-1]:
                prefixes.append([])
            continue
        digits = text.split()[-1]
        if (parsed := parse_name(digits)) is not None:
            prefixes[-1].append(_key_of(parsed, f"{path}:{number}"))
            continue
        if not re.fullmatch(r"(?:[0-9a-fA-F]{2}){5,}", digits) or len(digits) > _LONGEST_KEY:
            raise ConfigError(
                f"{path}:{number}: {text[:80]!r} is no key; expected 10 to {_LONGEST_KEY} hexadecimal digits, two a "
                "byte, or a name that 'kvtiers store ls' shows"
            )
        prefixes[-1].append(bytes.fromhex(digits))
    if not any(prefixes):
        raise ConfigError(f"{path}: there is no key in it")
    return [prefix for prefix in prefixes if prefix]


def _read_trace(path: str) -> tuple[list[Sequence[bytes]], int]:
    """Return the block hashes of each request, the latest first, and the tokens of a block."""
    try:  # a companion, which core does not import
        reader = importlib.import_module("kvtiers_replay.trace")
    except ImportError:
        raise ConfigError(
            "--trace is read by kvtiers-replay: pip install --find-links wheels 'kvtiers[replay]'"
        ) from None
    workload = reader.read_trace(path)
    return [request.block_hashes for request in reversed(workload.requests)], workload.tokens_per_block


def _of_trace(path: str, runs: list[Sequence[bytes]], tokens: int, tokens_per_chunk: int) -> Prefixes:
    blocks, rest = divmod(tokens_per_chunk, tokens)
    if rest or not blocks:
        raise ConfigError(
            f"{path}: its blocks have {tokens} tokens, the engine's chunks {tokens_per_chunk}; expected a multiple"
        )
    seen: set[OffloadKey] = set()
    prefixes: Prefixes = []
    for hashes in runs:
        keys = [make_offload_key(each, 0) for each in hashes[blocks - 1 :: blocks]]
        prefixes.append([key for key in keys if key not in seen])
        seen.update(keys)
    return [prefix for prefix in prefixes if prefix]


def _listed(config: str, tier: str, value_bytes: int) -> dict[str, list[OffloadKey]]:
    """Return the keys of the values in a tier's store by their fingerprints, those that were written last first."""
    with open_session(config, tier, value_bytes, writes=False) as session:
        found = sorted(session.values(Selection()), key=lambda value: modified(value.entry, tier), reverse=True)
        if session.is_over:
            raise ConfigError(session.failure or "interrupted")
    keys: dict[str, list[OffloadKey]] = {}
    for value in found:
        if value.parsed is not None and not value.parsed.is_hashed:
            key = _key_of(value.parsed, f"{config}: tier {tier!r}")
            keys.setdefault(value.parsed.fingerprint, []).append(key)
    return keys


def _key_of(parsed: ParsedName, where: str) -> OffloadKey:
    if parsed.key_id:
        raise ConfigError(
            f"{where}: the names of encrypted values hide their keys; expected the keys themselves, by --keys"
        )
    if parsed.is_hashed:
        raise ConfigError(f"{where}: a name with 'h' has a hash of a long key; expected the key itself")
    return with_tenant(parsed.key, parsed.tenant)


def _of_fingerprint(listed: dict[str, list[OffloadKey]], tier: str, fingerprint: str) -> Prefixes:
    if fingerprint not in listed:
        has = ", ".join(listed) or "none at all"
        raise CommandRefused(f"{tier} has no values of this engine's fingerprint, {fingerprint}; it has {has}")
    return [listed[fingerprint]]
