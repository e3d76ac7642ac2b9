"""A made-up workload of coding agents: long sessions, in which a tool's result follows a model's answer within seconds.

A session begins with the client's system prompt and tools, then the project's notes, then a task. Each step adds an
answer and a tool's result. Most tools take seconds, tests take minutes; when a task is done, the user reads and thinks,
or leaves. Some steps start a subagent, with a prompt of its own, that never comes back once it has reported. A session
that grows too long begins again from a summary: nothing behind the project's notes is used again.

Sizes and times are orders of magnitude of what such clients do, not a recording of one.
"""

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from kvtiers_replay.invented import Chance, Prompt, zipf
from kvtiers_replay.workload import ReplayRequest, Workload

__all__ = ["agent_workload"]

_TOKENS_PER_BLOCK = 512
_CLIENTS = ((14_000, 5_000), (9_000, 4_000), (18_000, 6_000))  # tokens of the system prompts: of it, of its subagents
_PROJECTS = 60
_USERS = 24  # with a session at the same time
_LONGEST = 110_000  # tokens, then a summary
_DONE = 0.08  # of the steps end a task
_SUBAGENT = 0.03  # of the steps start one
_LEAVES = 0.35  # of the tasks end their session


@dataclass(slots=True, eq=False)
class _Session:
    """``steps``: that a subagent still makes; None: a session of a user."""

    client: int
    project: int
    prompt: Prompt
    steps: int | None = None


def agent_workload(requests: int, seed: int = 0) -> Workload:
    """Return that many requests, the same for the same seed in every release of Python."""
    steps = itertools.islice(_steps(Chance(seed)), requests)
    return Workload("agent", _TOKENS_PER_BLOCK, list(steps))


def _steps(chance: Chance) -> Iterator[ReplayRequest]:
    """Yield the requests of all sessions in the order of their arrival; sessions follow each other for ever."""
    names = (f"text {number}" for number in itertools.count())
    notes = [int(chance.between(500, 4)) for _ in range(_PROJECTS)]
    numbers = itertools.count()
    waiting: list[tuple[float, int, _Session]] = []
    for _ in range(_USERS):
        heapq.heappush(waiting, (chance.between(1, 10), next(numbers), _begin(chance, notes, names)))
    while True:
        now, _, session = heapq.heappop(waiting)
        answer = int(chance.between(40, 5))
        yield session.prompt.request(round(now, 3), answer, {})
        session.prompt.add(next(names), answer)
        if session.steps is None and chance.happens(_SUBAGENT):
            other = _subagent(chance, session, names)
            heapq.heappush(waiting, (now + chance.between(1, 3), next(numbers), other))
        pause = _go_on(chance, session, notes, names)
        if pause is not None:
            heapq.heappush(waiting, (now + pause, next(numbers), session))
        elif session.steps is None:
            pause = chance.between(30, 6)
            heapq.heappush(waiting, (now + pause, next(numbers), _begin(chance, notes, names)))


def _begin(chance: Chance, notes: list[int], names: Iterator[str]) -> _Session:
    client = chance.by_rank(range(len(_CLIENTS)), zipf(len(_CLIENTS)))
    session = _Session(client, chance.by_rank(range(_PROJECTS), zipf(_PROJECTS)), Prompt(_TOKENS_PER_BLOCK))
    _fill(session, notes)
    session.prompt.add(next(names), int(chance.between(50, 5)))
    return session


def _fill(session: _Session, notes: list[int]) -> None:
    session.prompt = Prompt(_TOKENS_PER_BLOCK)
    session.prompt.add(f"client {session.client}", _CLIENTS[session.client][0])
    session.prompt.add(f"project {session.project}", notes[session.project])


def _subagent(chance: Chance, session: _Session, names: Iterator[str]) -> _Session:
    prompt = Prompt(_TOKENS_PER_BLOCK)
    prompt.add(f"subagent of client {session.client}", _CLIENTS[session.client][1])
    prompt.add(next(names), int(chance.between(100, 3)))
    return _Session(session.client, session.project, prompt, steps=int(chance.between(2, 3)))


def _go_on(chance: Chance, session: _Session, notes: list[int], names: Iterator[str]) -> float | None:
    """Add what follows an answer; return the seconds until the next request, None: there is none."""
    if session.steps is not None:
        session.steps -= 1
        if not session.steps:
            return None
    elif chance.happens(_DONE):
        if chance.happens(_LEAVES):
            return None
        session.prompt.add(next(names), int(chance.between(20, 5)))
        return chance.between(15, 7)  # up to half an hour
    elif session.prompt.tokens > _LONGEST:
        _fill(session, notes)
        session.prompt.add(next(names), int(chance.between(1_000, 2)))
        return chance.between(5, 2)
    session.prompt.add(next(names), int(chance.between(60, 7)))
    return chance.between(20, 4) if chance.happens(0.1) else chance.between(0.5, 4)
