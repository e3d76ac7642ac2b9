"""A synthetic workload of conversations about source code: the same for a seed on every machine and every Python.

Each conversation begins with one system prompt and one document, then goes on in turns: a question about a function
of the document, and an answer that quotes it. Every turn is a request whose prompt is the whole conversation so far.
Several conversations are open at a time, and popular documents are used more often.

The documents are made of invented names. Python's standard library would be real text, but differs between releases
of Python, and may be missing; for a KV cache only equality matters.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvtiers_replay.invented import Chance, zipf
from kvtiers_replay.workload import ReplayRequest, Workload

__all__ = ["CODE_TOKENS_PER_BLOCK", "code_workload"]

CODE_TOKENS_PER_BLOCK = 64

_SYSTEM_PROMPT = ("You answer questions about this library . Quote the source . Be brief . " * 18).split()
_SYLLABLES = ["ba", "co", "de", "fi", "gu", "ha", "jo", "ke", "li", "mu", "na", "po", "re", "si", "tu", "va"]
_WORDS = 600  # of the vocabulary
_DOCUMENTS = 48
_FUNCTIONS = range(8, 60)  # of a document, each of so many tokens:
_TOKENS = range(40, 200)
_ANSWER_TOKENS = range(60, 260)
_TURNS = range(2, 9)
_OPEN = 10  # conversations at the same time


@dataclass(slots=True, eq=False)
class _Document:
    tokens: list[str]
    functions: list[tuple[str, int]]
    """Names, and where in the tokens each begins."""


@dataclass(slots=True, eq=False)
class _Conversation:
    """A growing prompt: ``rest`` are the tokens behind the last full block, ``hashes`` are of the full blocks."""

    document: _Document
    turns: int
    hashes: list[bytes] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)

    def say(self, tokens: Sequence[str]) -> None:
        """Append tokens to the prompt."""
        self.rest += tokens
        full = len(self.rest) // CODE_TOKENS_PER_BLOCK * CODE_TOKENS_PER_BLOCK
        for start in range(0, full, CODE_TOKENS_PER_BLOCK):
            block = " ".join(self.rest[start : start + CODE_TOKENS_PER_BLOCK])
            before = self.hashes[-1] if self.hashes else b""
            self.hashes.append(hashlib.sha256(before + block.encode()).digest())
        del self.rest[:full]

    def request(self, arrival: float) -> ReplayRequest:
        """Return the prompt as it is now."""
        return ReplayRequest(len(self.hashes) * CODE_TOKENS_PER_BLOCK + len(self.rest), tuple(self.hashes), arrival)


def code_workload(requests: int, seed: int = 0) -> Workload:
    """Return that many requests, the same for the same seed in every release of Python."""
    chance = Chance(seed)
    words = ["".join(chance.of(_SYLLABLES) for _ in range(3)) for _ in range(_WORDS)]
    documents = [_document(chance, words) for _ in range(_DOCUMENTS)]
    return Workload("code", CODE_TOKENS_PER_BLOCK, list(_talk(documents, requests, chance)))


def _document(chance: Chance, words: Sequence[str]) -> _Document:
    document = _Document([], [])
    ends = zipf(len(words))
    for number in range(chance.of(_FUNCTIONS)):
        name = f"{chance.of(words)}_{number}"
        document.functions.append((name, len(document.tokens)))
        body = (chance.by_rank(words, ends) for _ in range(chance.of(_TOKENS)))
        document.tokens += ["def", name, *body]
    return document


def _talk(documents: Sequence[_Document], requests: int, chance: Chance) -> Iterator[ReplayRequest]:
    ends = zipf(len(documents))
    talks: list[_Conversation] = []
    for number in range(requests):
        while len(talks) < _OPEN:
            talk = _Conversation(chance.by_rank(documents, ends), chance.of(_TURNS))
            talk.say(_SYSTEM_PROMPT)
            talk.say(talk.document.tokens)
            talks.append(talk)
        talk = chance.of(talks)
        name, start = chance.of(talk.document.functions)
        talk.say(["User", ":", "What", "does", name, "do", ",", "and", "who", "calls", "it", "?"])
        yield talk.request(arrival=float(number))
        talk.say(["Assistant", ":", *talk.document.tokens[start : start + chance.of(_ANSWER_TOKENS)]])
        talk.turns -= 1
        if not talk.turns:
            talks.remove(talk)
