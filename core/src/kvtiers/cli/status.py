"""``kvtiers status``: whether kvtiers is on in this machine's engines, and whether it pays."""

import json
from collections.abc import Mapping
from typing import Any

import click

from kvtiers.api.units import format_size
from kvtiers.cli.engines import engines
from kvtiers.cli.metrics import is_what_if
from kvtiers.cli.output import in_words, print_heading, print_table
from kvtiers.metrics import SILENT_SECONDS, unread_chunks

__all__ = ["events_sentence", "state_of", "status", "verdict", "what_if_sentence", "writes_per_hit"]

_BREAKER = {0: "in use", 1: "out of use", 2: "being tried"}
_POOL = {
    1: "this engine has its memory, and the next one finds what is in it",
    2: "this engine has its memory, but no keeper takes what is new: the next engine does not find that",
    3: "not to be had: the memory is this engine's own, and ends with it ('kvtiers check' says why)",
}
_FEW_LOADS = 8  # jobs; with fewer a slow tier looks like a slow start
_WORTH = 0.05  # of what computing had taken, to be saved at least
_FEW_ASKED = 10_000  # chunks: with fewer the shadow caches have hardly begun
_FEW_POINTS = 0.5  # a change of less is no reason for one
_FEW_CHUNKS = 100  # with fewer written it is unclear whether that pays


@click.command(
    epilog="""\b
Examples:
  kvtiers status
  kvtiers status --what-if
  kvtiers status --json | jq '.[].tiers'

Columns: hits are chunks that requests read; tokens, theirs; saved, the time of computing them less that of loading;
read and written, between the tier and CPU memory; never read, of what was written; queue, chunks on their way. The
primary is the engine's CPU memory: its rows hold a chunk each.

Asks every engine on this machine that runs as the same user (root asks all), by a local socket, and changes nothing.
Exit status: 0, or 1 if there is no engine that answers."""
)
@click.option("--engine", "pid", type=int, metavar="PID", help="Show this engine alone.")
@click.option("--what-if", "asks_what_if", is_flag=True, help="Show what other sizes, policies and tiers would hit.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list, one object an engine.")
@click.pass_context
def status(ctx: click.Context, pid: int | None, asks_what_if: bool, as_json: bool) -> None:
    """Show each tier of each running engine, and whether it pays."""
    answers = [answer for answer in engines() if pid is None or answer["pid"] == pid]
    if as_json:
        click.echo(json.dumps(answers))
    elif not answers:
        process = "" if pid is None else f"process {pid} of "
        click.echo(f"no engine with kvtiers runs here as {process}this user", err=True)
    for answer in [] if as_json else answers:
        _print(answer)
        if asks_what_if:
            report = answer.get("what_if")
            _print_what_if(report if is_what_if(report) else {})
    ctx.exit(0 if answers else 1)


def _print(answer: Mapping[str, Any]) -> None:
    print_heading(f"{answer['engine']}, process {answer['pid']}: {answer['model']}")
    if answer["fingerprint"]:  # an engine whose tiers are all off has none
        click.echo(f"  namespace {answer['namespace']!r}, fingerprint {answer['fingerprint']}")
    if answer["orphaned"]:
        click.echo(f"  orphaned: the server that started it has ended, so no request arrives; kill {answer['pid']}")
    if answer["events"]:
        click.echo(f"  KV events: {events_sentence(answer['events'])}")
    if pool := _POOL.get(answer["figures"].get("pool", 0)):
        click.echo(f"  pool: {pool}")
    if late := answer["figures"].get("late_loads"):
        loads = "load" if late == 1 else "loads"
        click.echo(f"  {late:,.0f} {loads} came late, computed: vLLM logs 'Recovered from KV load failure' for each")
    if unusable := answer["figures"].get("unusable_prefixes"):
        requests = "1 request" if unusable == 1 else f"{unusable:,.0f} requests"
        click.echo(
            f"  {requests} found a stored prefix that ends before its next checkpoint, and loaded none of it: vLLM's "
            "--prefix-cache-retention-interval sets more checkpoints"
        )
    columns = ("tier", "state", "hits", "tokens", "saved", "read", "written", "never read", "queue", "last trouble")
    primary = [_primary_row(answer["figures"])] if answer["figures"] else []
    print_table(columns, [*primary, *(_row(name, tier) for name, tier in answer["tiers"].items())])
    for name, tier in answer["tiers"].items():
        sentence = verdict(tier)
        click.echo(f"  {name}: {sentence}")
        for line in (_trouble(tier, sentence), unread_chunks("it", tier), tier["budget"], writes_per_hit(tier)):
            if line:
                click.echo(f"  {name}: {line}")


def events_sentence(report: Mapping[str, Any]) -> str:
    """Return whether KV events are published, and whether routers can trust them, in one sentence."""
    if report["error"]:
        return f"none are published: {report['error']}"
    dropped = report["dropped_chunks"]
    lost = f"; {dropped:,} chunks' events were dropped: raise 'events.max_waiting'" if dropped else ", none dropped"
    return f"{report['endpoint']}, {report['batches']:,} batches of {report['chunks']:,} chunks{lost}"


def _print_what_if(report: Mapping[str, Any]) -> None:
    """Print the shadow caches' hit rates, and what they suggest in one sentence."""
    if not report:
        click.echo("  what if: nothing to say; it takes 'what_if: true' in the engine's config, and requests")
        return
    sizes = list(next(iter(report["hit_rates"].values())))
    columns = ("hits with", *(format_size(int(report["capacity"] * float(times))) for times in sizes))
    print_table(columns, [(name, *map(_percent, rates.values())) for name, rates in report["hit_rates"].items()])
    click.echo(
        f"  {report['chunks']:,} chunks asked for, {_percent(report['sampled'])} of them in the sample, "
        f"{report['dropped']:,} requests left out; an infinite cache hits {_percent(report['infinite'])}"
    )
    click.echo(f"  what if: {what_if_sentence(report)}")


def what_if_sentence(report: Mapping[str, Any]) -> str:
    """Return what another policy, more memory and each tier change, in points of hits, in one sentence."""
    if report["chunks"] < _FEW_ASKED:
        return f"nothing can be said yet: {report['chunks']:,} chunks were asked for, {_FEW_ASKED:,} say something"
    rates, policy = report["hit_rates"], report["policy"]
    points = {name: 100 * (of["1"] - rates[policy]["1"]) for name, of in rates.items() if name != policy}
    best = max(points, key=lambda name: points[name])
    parts = [
        f"with {best} {points[best]:+.1f} points" if points[best] >= _FEW_POINTS else f"{policy} is the best policy"
    ]
    more = {times: 100 * (rate - rates[policy]["1"]) for times, rate in rates[policy].items() if float(times) > 1}
    times = next((times for times, gain in more.items() if gain >= _FEW_POINTS), "")
    size = format_size(int(report["capacity"] * float(times or 8)))
    parts.append(f"with {size} {more[times]:+.1f}" if times else f"more memory, up to {size}, adds nothing")
    for name, share in report["adds"].items():
        drop = ": drop it" if 100 * share < _FEW_POINTS else ""
        parts.append(f"the {name} tier adds {100 * share:.1f}{drop}")
    return "; ".join(parts)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _primary_row(figures: Mapping[str, float]) -> tuple[str, ...]:
    hits, rows, free = (figures.get(name, 0) for name in ("primary_hits", "rows", "free_rows"))
    return ("primary", f"{free:,.0f} of {rows:,.0f} rows free", f"{hits:,.0f} chunks", *[""] * 7)


def _row(name: str, tier: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        name,
        state_of(tier),
        f"{tier['hits']:,.0f} chunks",
        f"{tier['tokens']:,.0f}",
        _saved(tier),
        format_size(int(tier["loaded_bytes"])),
        format_size(int(tier["stored_bytes"])),
        format_size(int(tier["unread_bytes"])),
        f"{tier['queue']:,.0f}",
        _last_trouble(tier),
    )


def _last_trouble(tier: Mapping[str, Any]) -> str:
    """Return when there was trouble last; what it was stands below the table."""
    if not tier["trouble"]:
        return "none"
    return f"{in_words(tier['trouble_seconds'])} ago{', over' if tier['trouble_is_over'] else ''}"


def _trouble(tier: Mapping[str, Any], sentence: str) -> str:
    """Return the last trouble in one line, unless the sentence before it has it already."""
    text = str(tier["trouble"])
    if not text or text in sentence or ((advice := _advice(text)) and advice in sentence):
        return ""
    return f"last trouble ({_last_trouble(tier)}): {text}"


def state_of(tier: Mapping[str, Any]) -> str:
    """Return a word or two for the state of a tier, as its engine has answered."""
    unusable = {
        "off": tier["off"],
        "retired": tier.get("retired"),
        f"{tier['switch']} (ctl)": tier["switch"] != "on",
        "not open": not tier["open"],
    }
    if word := next((word for word, holds in unusable.items() if holds), ""):
        return word
    if tier["breaker_state"]:
        return _BREAKER.get(int(tier["breaker_state"]), "?")
    if _is_silent(tier):
        return "no answer"
    states = {
        "takes little" if tier["taken_meanwhile"] else "full": tier["full"],
        "refusing": tier["refusing"],
        "too slow": tier["too_slow"],
    }
    words = [word for word, holds in states.items() if holds]
    return ", ".join(words) or _BREAKER[0]


def _is_silent(tier: Mapping[str, Any]) -> bool:
    """Return whether nothing comes of what the tier's store was asked for."""
    return bool(tier["silent_seconds"] >= SILENT_SECONDS)


def _saved(tier: Mapping[str, Any]) -> str:
    """Return the seconds saved, as the engine counts them; "?" while it has priced no load."""
    return in_words(tier["saved_seconds"]) if tier["computing_seconds"] or not tier["tokens"] else "?"


def verdict(tier: Mapping[str, Any]) -> str:
    """Return, in one sentence, whether a tier pays, and if not, why."""
    trouble = tier["trouble"] or "not opened yet"
    seconds = tier["breaker_seconds"] if tier["breaker_state"] else None
    since = f" for {in_words(seconds)}" if seconds else " now"
    left_out = tier.get("left_out_requests") or 0  # the whole stack leaves none out
    sentences = (
        (tier["off"], f"it does nothing here: {tier['off']}"),
        (tier.get("retired"), f"it brings nothing until the engine is started again: {trouble}"),
        (tier["switch"] == "off", "it does nothing: an operator has switched it off; 'kvtiers ctl' switches it on"),
        (
            not tier["open"] or tier["breaker_state"],
            f"it brings nothing{since}, since it cannot be used: {trouble}",
        ),
        (
            not tier["shared"],
            "its values are found by this process alone, and are lost with it; see the log's start",
        ),
        (_is_silent(tier), f"it brings nothing: {_silence(tier)}"),
        (tier["too_slow"], f"it brings next to nothing: {_said(tier, 'too slow')}"),
        (
            tier["full"],
            f"it takes {'little of what is' if tier['taken_meanwhile'] else 'nothing'} new: {_not_taken(tier)}",
        ),
        (tier["refusing"], f"it takes only some of what is new: {_not_taken(tier)}"),
        (tier["hits"] and _does_not_pay(tier) and not _few_loads(tier), f"it does not pay: {_brought(tier)}"),
        (tier["hits"] and _does_not_pay(tier), f"nothing can be said yet: {_brought(tier)}"),
        (tier["hits"], f"it pays: {_brought(tier)}"),
        (
            tier["seal_failures"],
            f"it does not pay: {tier['seal_failures']:.0f} values came back damaged; look at the backend",
        ),
        (
            tier["wait_expired"],
            "it does not pay: its answers come too late; see 'lookup_wait', or the way to the backend",
        ),
        (
            tier["recomputed_cheaper"],
            "it does not pay: computing is faster than reading from it; see the way to the backend, or 'load_wait'",
        ),
        (
            left_out and not tier["stored_chunks"],
            f"it does nothing for salted requests and for sessions in this release of vLLM: {left_out:.0f} came so far",
        ),
        (
            tier["stored_chunks"] >= _FEW_CHUNKS,
            "it does not pay: no prompt that it holds has come again after it had left the engine's own memory",
        ),
        (True, "nothing can be said yet: little was written, and nothing read"),
    )
    return next(sentence for holds, sentence in sentences if holds)


def writes_per_hit(tier: Mapping[str, Any]) -> str:
    """Return how many chunks were written for each that was read, in one line; "" while that says nothing yet."""
    written, hits = tier["written_chunks"], tier["hits"]
    if written < _FEW_CHUNKS:
        return ""
    if not hits:
        return f"{written:,.0f} chunks written, no hit so far"
    return f"{written / hits:,.1f} writes per hit: {written:,.0f} chunks written, {hits:,.0f} hits"


def _said(tier: Mapping[str, Any], state: str) -> str:
    """Return the log line of a state, if it was the last one logged, else where to look."""
    trouble = str(tier["trouble"])
    return trouble if trouble.startswith(state) else f"{state}; the log says what to do"


def _silence(tier: Mapping[str, Any]) -> str:
    calls = tier["waiting_calls"]
    waiting = "1 call waits" if calls == 1 else f"{calls:,.0f} calls wait"
    return f"no answer for {in_words(tier['silent_seconds'])}, {waiting}; look whether its backend hangs"


def _not_taken(tier: Mapping[str, Any]) -> str:
    """Return how many values were not taken, when the last one was, and what to do."""
    advice = _advice(str(tier["trouble"])) or "the log says what to do"
    if not (count := tier["not_taken"]):
        return advice
    ago, taken = in_words(tier["not_taken_seconds"]), tier["taken_meanwhile"]
    beside = f", {taken:,.0f} were" if taken else ""
    return f"{count:,.0f} values not taken{beside}, the last {ago} ago; {advice}"


def _advice(trouble: str) -> str:
    """Return what the log line of a store that does not take values says of the reason, or what to do."""
    return trouble.partition("what it holds is read as before; ")[2]


def _does_not_pay(tier: Mapping[str, Any]) -> bool:
    """Return whether nearly nothing was saved."""
    return bool(tier["saved_seconds"] < _WORTH * tier["computing_seconds"])


def _few_loads(tier: Mapping[str, Any]) -> bool:
    """Return whether there were too few loads to distinguish a slow tier from a slow start."""
    return bool(tier["loads"] < _FEW_LOADS)


def _brought(tier: Mapping[str, Any]) -> str:
    read = f"{tier['tokens']:,.0f} tokens came from it in {in_words(tier['load_seconds'])} of reading"
    if not (computing := tier["computing_seconds"]):
        return f"{read}; how long computing takes is not known yet, since this engine has computed no prompt"
    return f"{read}, which this engine computes in {in_words(computing)}"
