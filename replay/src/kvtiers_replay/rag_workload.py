"""A made-up workload of retrieval: a question, and behind a system prompt the passages that were found for it.

What is found differs for nearly each question, and the order of the passages with it, so little more than the system
prompt is ever used again: the first passage where it is a popular one, all of them where a question is asked often,
and the whole prompt where the user asks on.
"""

import heapq
import itertools
from collections.abc import Iterator

from kvtiers_replay.invented import Chance, Prompt, zipf
from kvtiers_replay.workload import ReplayRequest, Workload

__all__ = ["rag_workload"]

_TOKENS_PER_BLOCK = 256
_SYSTEM_TOKENS = (2_200, 1_500, 3_100)  # of each application
_PASSAGES = 40_000
_TOPICS = 500
_FOUND = range(6, 13)  # passages for a question
_FREQUENT = 400  # questions that are asked often, with the same passages each time
_IS_FREQUENT = 0.10
_ASKS_ON = 0.15
_PAUSE = 0.25  # seconds between questions, at least


def rag_workload(requests: int, seed: int = 0) -> Workload:
    """Return that many requests, the same for the same seed in every release of Python."""
    return Workload("rag", _TOKENS_PER_BLOCK, list(itertools.islice(_questions(Chance(seed)), requests)))


def _questions(chance: Chance) -> Iterator[ReplayRequest]:
    """Yield the requests in the order of their arrival, for ever."""
    names = (f"text {number}" for number in itertools.count())
    topics, frequent = zipf(_TOPICS), zipf(_FREQUENT)
    often = [_ask(chance, topics, f"question {number}") for number in range(_FREQUENT)]
    later: list[tuple[float, int, Prompt]] = []  # conversations that go on
    numbers, now = itertools.count(), 0.0
    while True:
        now += chance.between(_PAUSE, 4)
        while later and later[0][0] <= now:
            arrival, _, prompt = heapq.heappop(later)
            yield _answered(chance, prompt, arrival, names, later, numbers)
        if chance.happens(_IS_FREQUENT):
            prompt = chance.by_rank(often, frequent).copy()
        else:
            prompt = _ask(chance, topics, next(names))
        yield _answered(chance, prompt, now, names, later, numbers)


def _ask(chance: Chance, topics: list[float], question: str) -> Prompt:
    """Return the prompt of a question: what was found is mostly of one topic, the popular passages of it first."""
    prompt = Prompt(_TOKENS_PER_BLOCK)
    application = chance.of(range(len(_SYSTEM_TOKENS)))
    prompt.add(f"application {application}", _SYSTEM_TOKENS[application])
    first = chance.by_rank(range(_TOPICS), topics) * (_PASSAGES // _TOPICS)
    passages = range(first, first + _PASSAGES // _TOPICS)
    for passage in dict.fromkeys(chance.of(passages) for _ in range(chance.of(_FOUND))):
        prompt.add(f"passage {passage}", 300 + passage % 401)
    prompt.add(question, 30)
    return prompt


def _answered(
    chance: Chance,
    prompt: Prompt,
    arrival: float,
    names: Iterator[str],
    later: list[tuple[float, int, Prompt]],
    numbers: Iterator[int],
) -> ReplayRequest:
    answer = int(chance.between(50, 3))
    request = prompt.request(round(arrival, 3), answer, {})
    if chance.happens(_ASKS_ON):
        prompt.add(next(names), answer + int(chance.between(10, 3)))
        heapq.heappush(later, (arrival + chance.between(8, 4), next(numbers), prompt))
    return request
