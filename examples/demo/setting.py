"""The sizes of the model, the documents and the tiers. Two settings: the demo's, and one that takes seconds."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from demo.transformer import Size

__all__ = ["BLOCKS_PER_CHUNK", "TOKENS_PER_BLOCK", "TOKENS_PER_CHUNK", "EngineOptions", "Setting"]

TOKENS_PER_BLOCK = 16
BLOCKS_PER_CHUNK = 4
TOKENS_PER_CHUNK = TOKENS_PER_BLOCK * BLOCKS_PER_CHUNK
_FLOAT_BYTES = 4
_VALUE_BYTES = 4096  # values are whole multiples of it, with their seal


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """One engine. ``threads``: of its matrix products, so that figures compare on machines of any size.

    ``config``: of kvtiers, None without; ``check_seals`` False: see ``serve.py``.
    """

    size: Size
    num_blocks: int
    piece: int
    threads: int
    config: Mapping[str, Any] | None = None
    check_seals: bool = True

    def as_data(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> "EngineOptions":
        """Return what ``as_data`` was made of."""
        return cls(**{**data, "size": Size(**data["size"])})


@dataclass(frozen=True, slots=True)
class Setting:
    """Lengths in tokens. ``piece``: computed at most in one step. ``least_gain``: of a hit, in times to first token.

    For act 4: how long it waits for a tier, as in a config, and how many times as long a step may take with one.
    """

    folder: Path
    size: Size = field(default_factory=Size)
    document_tokens: int = 2048
    question_tokens: int = 64
    new_tokens: int = 8
    piece: int = 256
    threads: int = 1  # with several, each waits for the slowest: on a busy machine that takes most of the time
    least_gain: float = 2.0
    lookup_wait: str = "100ms"
    load_wait: str = "auto"
    most_ratio: float = 2.0

    @classmethod
    def quick(cls, folder: Path) -> "Setting":
        """Return a size for tests: everything happens, but hardly anything takes time, so gains mean nothing."""
        size = Size(layers=2, width=128, heads=2, hidden=256, vocabulary=512)
        # Computing is quicker than any tier here: 'auto' would rightly wait for none.
        waits = {"lookup_wait": "3s", "load_wait": "10s"}
        return cls(folder, size, document_tokens=512, piece=128, least_gain=0.0, most_ratio=math.inf, **waits)

    @property
    def chunks(self) -> int:
        """Chunks of a document with one question and its answer."""
        return -(-(self.document_tokens + self.question_tokens + self.new_tokens) // TOKENS_PER_CHUNK)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk's value."""
        payload = self.size.layers * 2 * TOKENS_PER_CHUNK * self.size.head_width * _FLOAT_BYTES
        return payload + _VALUE_BYTES

    def prompt(self, document: int, question: int) -> list[int]:
        """Return a document with a question behind it: random tokens, the same for the same numbers."""
        texts = (([document], self.document_tokens), ([document, question], self.question_tokens))
        vocabulary = self.size.vocabulary
        return [int(token) for seed, n in texts for token in np.random.default_rng(seed).integers(0, vocabulary, n)]

    def engine(self, config: Mapping[str, Any] | None = None, *, check_seals: bool = True) -> EngineOptions:
        """Return an engine whose own memory has room for one conversation, as a GPU's has for a few of many."""
        tokens = self.document_tokens + self.question_tokens + self.new_tokens
        blocks = -(-tokens // TOKENS_PER_BLOCK)
        return EngineOptions(self.size, blocks, self.piece, self.threads, config, check_seals)

    def config(self, *tiers: Mapping[str, Any], documents: float) -> dict[str, Any]:
        """Return a config for kvtiers with these tiers and a primary for so many documents."""
        return {
            "version": 1,
            "namespace": "demo",
            "primary": {"capacity": self.capacity(documents)},
            "secondary": [{"exists_ttl": "1s", **tier} for tier in tiers],
            # Longer than the defaults, so that a busy machine does not turn a hit into a miss.
            "lookup_wait": "10s",
            "load_wait": "60s",
            # Shares for many rows; here a document is a third of them.
            "budgets": {"store_reserve": 0.02, "all_tiers": 0.9, "one_tier": 0.9, "protected": 0.08},
        }

    def fs(self, folder: str = "fs", **more: object) -> dict[str, Any]:
        """Return an fs tier in a folder below this setting's."""
        return {"type": "fs", "path": str(self.folder / folder), "capacity": "1GiB", "min_free": "0B", **more}

    def capacity(self, documents: float) -> int:
        """Return the bytes of so many documents, each with a question."""
        return round(documents * self.chunks) * self.chunk_bytes
