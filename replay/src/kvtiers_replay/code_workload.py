"""Conversations over real text that every machine has: the sources of Python's standard library.

Each conversation begins with one system prompt and one document, then goes on in turns: a question about a function
of the document, and an answer. Every turn is a request whose prompt is all that was said before. Several conversations
are open at a time, and well-known documents are talked about more often, as people do.
"""

import hashlib
import random
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvtiers.api import ConfigError
from kvtiers_replay.workload import ReplayRequest, Workload

__all__ = ["CODE_TOKENS_PER_BLOCK", "code_workload"]

CODE_TOKENS_PER_BLOCK = 64

_SYSTEM_PROMPT = "You answer questions about Python's standard library. Quote the source. Be brief. " * 12
_TOKEN = re.compile(r"\w+|\s+|[^\w\s]")
_DEFINITION = re.compile(r"^\s*(?:def|class) (\w+)", re.MULTILINE)
_SMALLEST, _LARGEST = 8_000, 60_000  # bytes of a source that makes a good document: 30 to 300 blocks
_DOCUMENTS = 48
_OPEN = 10  # conversations at the same time


@dataclass(slots=True, eq=False)
class _Document:
    text: str
    names: list[str]


@dataclass(slots=True, eq=False)
class _Conversation:
    """A growing prompt: ``rest`` are the tokens behind the last full block, ``hashes`` are of the full blocks."""

    document: _Document
    turns: int
    hashes: list[bytes] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Append a text to the prompt."""
        self.rest += _TOKEN.findall(text)
        full = len(self.rest) // CODE_TOKENS_PER_BLOCK * CODE_TOKENS_PER_BLOCK
        for start in range(0, full, CODE_TOKENS_PER_BLOCK):
            block = "\0".join(self.rest[start : start + CODE_TOKENS_PER_BLOCK])
            before = self.hashes[-1] if self.hashes else b""
            self.hashes.append(hashlib.sha256(before + block.encode()).digest())
        del self.rest[:full]

    def request(self, arrival: float) -> ReplayRequest:
        """Return the prompt as it is now."""
        return ReplayRequest(len(self.hashes) * CODE_TOKENS_PER_BLOCK + len(self.rest), tuple(self.hashes), arrival)


def code_workload(requests: int, seed: int = 0) -> Workload:
    """Return that many requests. The same on one Python version for the same seed. ConfigError without sources."""
    chance = random.Random(seed)  # noqa: S311 -- a workload, not a secret
    documents = list(_documents(chance))
    if not documents:
        raise ConfigError(
            f"no Python sources of the standard library under {_library()}, which '--workload code' reads; "
            "install them, or use --trace"
        )
    return Workload("code", CODE_TOKENS_PER_BLOCK, list(_talk(documents, requests, chance)))


def _library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _documents(chance: random.Random) -> Iterator[_Document]:
    paths = [path for path in sorted(_library().glob("*.py")) if _SMALLEST <= path.stat().st_size <= _LARGEST]
    chance.shuffle(paths)
    for path in paths[:_DOCUMENTS]:
        text = path.read_text(encoding="utf-8", errors="replace")
        yield _Document(text, _DEFINITION.findall(text) or [path.stem])


def _talk(documents: list[_Document], requests: int, chance: random.Random) -> Iterator[ReplayRequest]:
    # Zipf: the document of rank r is talked about 1/r as often as the first.
    weights = [1 / rank for rank in range(1, len(documents) + 1)]
    talks: list[_Conversation] = []
    for number in range(requests):
        while len(talks) < _OPEN:
            talk = _Conversation(chance.choices(documents, weights)[0], turns=chance.randint(2, 8))
            talk.say(_SYSTEM_PROMPT)
            talk.say(talk.document.text)
            talks.append(talk)
        talk = chance.choice(talks)
        name = chance.choice(talk.document.names)
        talk.say(f"\n\nUser: What does {name} do, and who calls it?\n\n")
        yield talk.request(arrival=float(number))
        talk.say(f"Assistant: {_answer(talk.document, name)}")
        talk.turns -= 1
        if not talk.turns:
            talks.remove(talk)


def _answer(document: _Document, name: str) -> str:
    start = max(0, document.text.find(name) - 200)
    return document.text[start : start + 1200]
