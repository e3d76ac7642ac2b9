"""A small LLM engine: requests in, tokens out, KV in paged blocks, and a prefix cache over those.

It serves in steps, as engines do: each step computes a piece of every running request's prompt, or its next token.
``tiered.py`` adds kvtiers to it, by the four calls that do nothing here.
"""

import time
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from demo.pool import BlockPool
from demo.setting import TOKENS_PER_BLOCK
from demo.transformer import Size, Transformer
from kvtiers import BlockHashChain, RequestContext

__all__ = ["Engine", "Request", "Step"]

_IDLE_SECONDS = 0.0005


class Step(NamedTuple):
    """What a step took, in seconds, and how much of that it computed; ``work``: (first token, tokens) by request."""

    seconds: float
    computing: float
    work: tuple[tuple[int, int], ...]


@dataclass(eq=False)
class Request:
    """A prompt and what was generated so far, in the form in which kvtiers' scheduler reads it."""

    context: RequestContext
    tokens: list[int]
    new_tokens: int
    prompt_tokens: int = 0
    computed: int = 0
    cached: int = 0  # tokens that were in the engine's own prefix cache
    loaded: int = 0  # tokens that kvtiers brought
    loading: bool = False
    first_token: float | None = None
    chain: BlockHashChain = field(default_factory=lambda: BlockHashChain(TOKENS_PER_BLOCK))
    block_ids: tuple[list[int]] = field(default_factory=lambda: ([],))

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)
        self.chain.extend(self.tokens)

    @property
    def num_tokens(self) -> int:
        """All tokens so far, computed or not."""
        return len(self.tokens)

    @property
    def block_hashes(self) -> tuple[list[bytes]]:
        """The hash of each full block; one KV group."""
        return (self.chain.hashes,)

    @property
    def answer(self) -> list[int]:
        """What was generated."""
        return self.tokens[self.prompt_tokens :]

    @property
    def done(self) -> bool:
        """Say whether all tokens are there that were asked for."""
        return len(self.answer) == self.new_tokens


class Engine:
    """Memory for ``num_blocks`` blocks. ``piece``: most prompt tokens of one request that one step computes."""

    def __init__(self, size: Size, num_blocks: int, piece: int) -> None:
        self.model = Transformer(size)
        shape = (num_blocks, 2, TOKENS_PER_BLOCK, size.head_width)
        self.kv = [np.zeros(shape, np.float32) for _ in range(size.layers)]
        self.pool = BlockPool(num_blocks)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.steps: list[Step] = []
        self._piece = piece
        self._prefill = (0, 0.0)

    # -- what kvtiers does, if there is one

    def find(self, request: Request, cached: int) -> int | None:  # noqa: ARG002 -- see tiered.py
        """Return how many tokens after the first ``cached`` can be loaded; None: not known yet."""
        return 0

    def load(self, request: Request, tokens: int) -> None:
        """Begin to load so many tokens into the request's blocks."""

    def keep(self, request: Request) -> None:
        """Take note of what has been computed."""

    def end_step(self, prefill_tokens: int, prefill_seconds: float) -> None:
        """End a step."""

    # -- serving

    def submit(self, request: Request) -> None:
        """Let a request wait for its turn."""
        self.waiting.append(request)

    def busy(self) -> bool:
        """Say whether there is anything to step for."""
        return bool(self.waiting or self.running)

    def step(self) -> None:
        """Admit a request, compute a piece or a token of each that runs, and end the step."""
        began = time.perf_counter()
        if self.waiting and self._admit(self.waiting[0]):
            self.running.append(self.waiting.pop(0))
        ready = [request for request in self.running if not request.loading]
        before = time.perf_counter()
        self._prefill = (0, 0.0)
        work = tuple(self._compute(request) for request in ready)
        computing = time.perf_counter() - before
        for request in ready:
            self._computed(request)
        self.end_step(*self._prefill)
        self.steps.append(Step(time.perf_counter() - began, computing, work))
        if not work:
            time.sleep(_IDLE_SECONDS)

    def close(self) -> None:
        """End the engine."""

    def _admit(self, request: Request) -> bool:
        """Give a request its blocks, filled as far as any request has them; False: not now."""
        # The last token is always computed, so a block that ends with it is of no use.
        usable = request.block_hashes[0][: (request.num_tokens - 1) // TOKENS_PER_BLOCK]
        in_pool = self.pool.match(usable)
        tokens = self.find(request, in_pool * TOKENS_PER_BLOCK)
        # All that it will ever need, so that no request has to be preempted.
        needed = -(-(request.prompt_tokens + request.new_tokens) // TOKENS_PER_BLOCK)
        blocks = None if tokens is None else self.pool.allocate(usable[:in_pool], needed)
        if tokens is None or blocks is None:
            return False
        request.block_ids[0].extend(blocks)
        request.cached = request.computed = in_pool * TOKENS_PER_BLOCK
        self.load(request, tokens)
        return True

    def _compute(self, request: Request) -> tuple[int, int]:
        """Compute what is next: up to the next multiple of the piece, so that pieces are the same whatever was hit."""
        start, began = request.computed, time.perf_counter()
        todo = request.tokens[start : (start // self._piece + 1) * self._piece]
        logits = self.model.forward(todo, start, self.kv, request.block_ids[0])
        request.computed += len(todo)
        if request.computed <= request.prompt_tokens:
            tokens, seconds = self._prefill
            self._prefill = tokens + len(todo), seconds + time.perf_counter() - began
        if request.computed == request.num_tokens:
            request.tokens.append(int(logits.argmax()))
            request.chain.extend(request.tokens[-1:])
            request.first_token = request.first_token or time.perf_counter()
        return start, len(todo)

    def _computed(self, request: Request) -> None:
        full = request.computed // TOKENS_PER_BLOCK
        self.pool.publish(request.block_hashes[0][:full], request.block_ids[0][:full])
        self.keep(request)
        if request.done:
            self.running.remove(request)
            self.pool.release(request.block_ids[0])
