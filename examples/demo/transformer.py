"""A transformer in numpy, as small as one can be that is one: random weights, real attention over KV in paged blocks.

Its tokens mean nothing, but each depends on all before it: wrong KV makes other tokens. ``kv[layer]`` has the shape
(blocks, 2, tokens per block, head width), float32: the rotated keys and the values of one KV head, shared by all heads.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Size", "Transformer"]

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Size:
    """How large a model is; the default takes 77 MB, and computes 2,048 tokens in about 1.5 s on one core."""

    layers: int = 6
    width: int = 512
    heads: int = 4
    hidden: int = 2048
    vocabulary: int = 4096

    @property
    def head_width(self) -> int:
        """Numbers in one head's query, key or value."""
        return self.width // self.heads


class Transformer:
    """The weights, which follow from ``seed``, and the computation."""

    def __init__(self, size: Size, seed: int = 0) -> None:
        self.size = size
        rng, width, head = np.random.default_rng(seed), size.width, size.head_width

        def matrix(rows: int, columns: int, scale: float = 1.0) -> Floats:
            return rng.standard_normal((rows, columns), np.float32) * np.float32(scale / rows**0.5)

        self.embedding = rng.standard_normal((size.vocabulary, width), np.float32)
        self.head = matrix(width, size.vocabulary)
        self.layers = [
            (
                # Queries and keys of some length: attention that looks at something, not at everything alike.
                np.hstack([matrix(width, width, 1.7), matrix(width, head, 1.7), matrix(width, head)]),
                matrix(width, width, 2.0),
                matrix(width, size.hidden),
                matrix(size.hidden, width),
            )
            for _ in range(size.layers)
        ]
        self._turns = 10_000.0 ** (-np.arange(0, head, 2) / head)

    def digest(self) -> str:
        """Return what identifies these weights: KV of others must never be used with them."""
        state = hashlib.sha256()
        for weights in (self.embedding, self.head, *(part for layer in self.layers for part in layer)):
            state.update(weights.data)
        return state.hexdigest()

    def forward(self, tokens: list[int], start: int, kv: list[Floats], blocks: list[int]) -> Floats:
        """Compute ``tokens``, the first of which is the ``start``-th, write their KV, return the last one's logits.

        The KV of all tokens before ``start`` is in ``blocks``, a prompt's blocks in order.
        """
        size, end = self.size, start + len(tokens)
        per_block = kv[0].shape[2]
        places = np.arange(start, end)
        at = np.asarray(blocks)[places // per_block], places % per_block
        used = blocks[: -(-end // per_block)]
        hidden_from = np.triu(np.full((len(tokens), end), -np.inf, np.float32), start + 1)
        turn = np.exp(1j * places[:, None] * self._turns).astype(np.complex64)[:, None]
        x = self.embedding[tokens]
        for (qkv, out, up, down), cache in zip(self.layers, kv, strict=True):
            q, k, v = np.split((_norm(x) @ qkv).reshape(len(x), -1, size.head_width), [-2, -1], axis=1)
            cache[at[0], 0, at[1]] = _rotate(k, turn)[:, 0]
            cache[at[0], 1, at[1]] = v[:, 0]
            keys, values = np.moveaxis(cache[used], 1, 0).reshape(2, -1, size.head_width)[:, :end]
            scores = _rotate(q, turn).swapaxes(0, 1) @ keys.T * np.float32(size.head_width**-0.5) + hidden_from
            x = x + (_softmax(scores) @ values).swapaxes(0, 1).reshape(len(x), -1) @ out
            x = x + np.maximum(_norm(x) @ up, 0) @ down
        logits: Floats = _norm(x[-1]) @ self.head
        return logits


def _norm(x: Floats) -> Floats:
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(1e-6)))


def _rotate(x: Floats, turn: npt.NDArray[np.complex64]) -> Floats:
    """Turn each pair of numbers by an angle that follows from the token's place."""
    return np.asarray((np.ascontiguousarray(x).view(np.complex64) * turn).view(np.float32))


def _softmax(scores: Floats) -> Floats:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))
