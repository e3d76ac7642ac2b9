"""Act 4. It stays out of the way: a tier's host is stopped, then killed, then the whole engine, all in mid-run."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

from demo.acts import expect
from demo.machine import Process, children, holders, host_of, is_alive, wait_until
from demo.process import Answer, EngineProcess
from demo.setting import TOKENS_PER_CHUNK, Setting
from demo.table import Table, say

__all__ = ["Pace", "it_stays_out_of_the_way", "judge"]

_DOCUMENTS = range(1, 5)
_NEW_DOCUMENT = 5
_SLACK_SECONDS = 0.010
_PATIENCE = 30.0
_DEADLINE = "2s"


def it_stays_out_of_the_way(setting: Setting) -> str:
    """Ask an engine with a tier and one without in turns, while bad things happen to the tier; then kill the engine."""
    # Many short steps: a delay would be seen.
    tokens = max(setting.document_tokens // 8, 2 * TOKENS_PER_CHUNK)
    setting = replace(setting, document_tokens=tokens, new_tokens=24, piece=TOKENS_PER_CHUNK)
    # One host on any machine: it is what is stopped and killed.
    tier = setting.fs(required=True, processes=1, deadline=_DEADLINE, grace="500ms", exists_ttl="60s")
    # Four documents are asked for in turns, and the primary has no room for two: what is known comes from the tier.
    config = setting.config(tier, documents=1.7) | {"lookup_wait": setting.lookup_wait, "load_wait": setting.load_wait}
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(EngineProcess(setting.folder, "without", setting.engine()))
        tiered = EngineProcess(setting.folder, "with", setting.engine(config))
        stack.callback(tiered.kill)
        pair = _Pair(setting, plain, tiered)
        pair.ask_all("never asked before", known=False)
        pair.ask_all("asked again", known=True)
        host = _signal_host(tiered, signal.SIGSTOP)
        pair.ask_until_hits_return("host stopped")
        expect(not is_alive(host), "there are hits again, but the stopped host was not replaced")
        pair.ask_all("asked again", known=True)
        _signal_host(tiered, signal.SIGKILL)
        pair.ask_until_hits_return("host killed")
        pair.ask_all("asked again", known=True)
        shown = pair.judge()
        say(f"  The engine is killed with -9 while it stores. Left of it: {_kill_in_mid_store(setting, tiered)}")
        with EngineProcess(setting.folder, "restarted", setting.engine(config)) as restarted:
            _ask_restarted(setting, plain, restarted)
    return f"{shown}; hits came back each time, and nothing was left behind"


class Pace(NamedTuple):
    """Steps of both engines with the same work in them, in seconds."""

    without: list[float]
    with_tier: list[float]


class _Pair:
    """The two engines, asked the same; what they took."""

    def __init__(self, setting: Setting, plain: EngineProcess, tiered: EngineProcess) -> None:
        self._setting = setting
        self._plain = plain
        self._tiered = tiered
        self._documents = cycle(_DOCUMENTS)
        self._question = 0
        self._answers: list[tuple[Answer, Answer]] = []
        self._table = Table(
            ("", -18), ("questions", 9), ("from the tier", 13), ("first token without", 19), ("with", 8),
            ("step p99 without", 16), ("with", 8), ("in kvtiers", 10),
        )  # fmt: skip

    def ask_all(self, what: str, *, known: bool) -> None:
        """Ask once about each document. Known ones come from the tier, most at least: to compute one may be cheaper."""
        from_tier = self._show(what, [self._ask() for _ in _DOCUMENTS])
        least, most = (len(_DOCUMENTS) // 2, len(_DOCUMENTS)) if known else (0, 0)
        expect(least <= from_tier <= most, f"{what}: {from_tier} of {len(_DOCUMENTS)} documents came from the tier")

    def ask_until_hits_return(self, what: str) -> None:
        """Ask until a document comes from the tier again; the first one must not."""
        until = time.monotonic() + _PATIENCE
        answers = [self._ask()]
        expect(not _from_tier(answers[0][1]), f"{what}: its tier still had hits, so nothing was seen")
        while not _from_tier(answers[-1][1]):
            expect(time.monotonic() < until, f"{what}: {_PATIENCE:g} s later nothing comes from its tier")
            answers.append(self._ask())
        self._show(what, answers)

    def judge(self) -> str:
        """Show the whole run; ActError if the tier was in the way."""
        self._show("whole run", self._answers)
        return judge(_same_work(self._answers), self._setting.most_ratio)

    def _ask(self) -> tuple[Answer, Answer]:
        self._question += 1
        document = next(self._documents)
        prompt = self._setting.prompt(document, self._question)
        tiered = self._tiered.ask(prompt, self._setting.new_tokens)
        plain = self._plain.ask(prompt, self._setting.new_tokens)
        expect(plain.tokens == tiered.tokens, f"document {document}: the engine with a tier gave other tokens")
        self._answers.append((plain, tiered))
        return plain, tiered

    def _show(self, what: str, answers: list[tuple[Answer, Answer]]) -> int:
        from_tier = sum(_from_tier(tiered) for _, tiered in answers)
        firsts = [median(answer.first_token for answer in column) for column in zip(*answers, strict=True)]
        inside = [step.seconds - step.computing for _, tiered in answers for step in tiered.steps]
        self._table.row(
            what, str(len(answers)), str(from_tier), *(f"{seconds:.3f} s" for seconds in firsts),
            *(f"{_p99(steps) * 1e3:.1f} ms" for steps in (*_same_work(answers), inside)),
        )  # fmt: skip
        return from_tier


def judge(pace: Pace, most_ratio: float) -> str:
    """Say how the steps compare; ActError if they took longer with a tier than noise explains."""
    without, with_tier = map(_p99, pace)
    most = most_ratio * without + _SLACK_SECONDS
    said = f"99 of 100 steps took {with_tier * 1e3:.0f} ms at most, {without * 1e3:.0f} ms without tiers"
    expect(with_tier <= most, f"{said}; expected {most * 1e3:.0f} ms")
    return said


def _same_work(answers: list[tuple[Answer, Answer]]) -> Pace:
    pace = Pace([], [])
    for plain, tiered in answers:
        seconds = {step.work: step.seconds for step in plain.steps}
        both = [step for step in tiered.steps if step.work in seconds]
        pace.without.extend(seconds[step.work] for step in both)
        pace.with_tier.extend(step.seconds for step in both)
    return pace


def _from_tier(answer: Answer) -> bool:
    return answer.sources.get("fs", 0) > 0


def _p99(seconds: list[float]) -> float:
    return quantiles(seconds, n=100, method="inclusive")[-1]


def _signal_host(engine: EngineProcess, number: signal.Signals) -> Process:
    host = host_of(engine.pid, "fs")
    expect(host is not None, "the tier has no host")
    assert host is not None
    os.kill(host.pid, number)
    return host


def _kill_in_mid_store(setting: Setting, engine: EngineProcess) -> str:
    """Kill the engine while it stores a new document; say what it has left behind, ActError if that is anything."""
    store = setting.folder / "fs"
    engine.settle()
    before, processes = set(_values(store)), children(engine.pid)
    engine.begin(setting.prompt(_NEW_DOCUMENT, 0), setting.new_tokens)
    expect(wait_until(lambda: set(_values(store)) > before, _PATIENCE), "a new document was not stored")
    engine.kill()
    wait_until(lambda: not any(map(is_alive, processes)) and not holders(engine.engine_id), _PATIENCE)
    left = {
        "processes": sum(map(is_alive, processes)),
        "holders of its memory": len(holders(engine.engine_id)),
        "shared files": len(list(Path("/dev/shm").glob(f"*{engine.engine_id}*"))),
        "temporary files": len(list(engine.temp.iterdir())),
    }
    said = ", ".join(f"{what} {number}" for what, number in left.items())
    expect(not any(left.values()), f"the killed engine has left something behind: {said}")
    return said


def _values(store: os.PathLike[str]) -> Iterator[str]:
    for folder, _, names in os.walk(store):
        yield from (f"{folder}/{name}" for name in names if not name.startswith("."))


def _ask_restarted(setting: Setting, plain: EngineProcess, engine: EngineProcess) -> None:
    """Ask the restarted engine for what it had stored, and for what it was storing when it was killed."""
    for document in (1, _NEW_DOCUMENT):
        prompt = setting.prompt(document, 0)
        answer = engine.ask(prompt, setting.new_tokens)
        say(
            f"  Restarted, document {document}: first token after {answer.first_token:.3f} s, "
            f"{len(prompt) - answer.saved} of {len(prompt)} tokens computed, the rest came from {answer.origin}"
        )
        expect(answer.tokens == plain.ask(prompt, setting.new_tokens).tokens, "the restarted engine gave other tokens")
        # Of the new document only what was whole is there, which may be nothing.
        stored = document == _NEW_DOCUMENT or answer.saved >= setting.document_tokens
        expect(stored, f"document {document} was stored, but {answer.saved} tokens were loaded")
