"""A prefix cache for ``generate``: what any process has computed of a prompt is loaded, and what is new is stored.

    generate(ids)   look up the longest restorable prefix -> a cache that stands there
                    compute up to the prompt's last boundary, in pieces   (models with windows or states alone)
                    model.generate(ids, cache=...)                        the rest of the prompt, and the answer
                    hand what is new to the writer, which packs and puts it

Calls are made on one thread at a time, as those of the model are. Nothing here raises into them for the cache's sake:
where the cache cannot serve, or fails, the model computes.
"""

import hashlib
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
import transformers
from transformers import DynamicCache, StoppingCriteriaList

from kvtiers import BlockHashChain, OffloadConfig, load_config, open_client
from kvtiers.api import ConfigError
from kvtiers.types import TENANT_FIELD
from kvtiers_transformers.adapters import active_adapters
from kvtiers_transformers.arguments import left_padding, problem_of
from kvtiers_transformers.geometry import ValueKind
from kvtiers_transformers.identity import identity_of, refuse_model, text_config
from kvtiers_transformers.load_or_compute import FirstToken, LoadOrCompute
from kvtiers_transformers.model_checks import ModelGuard, probe
from kvtiers_transformers.prefill import Prefill, stack
from kvtiers_transformers.reader import Reader, key_of
from kvtiers_transformers.values import freeze, held
from kvtiers_transformers.writer import Writer

__all__ = ["PrefixCache"]

_log = logging.getLogger("kvtiers")
_BOUNCE_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}  # half of it is what a load has in flight: 16 values of 32 MiB
_COUNTS = ("prompts", "prompt_tokens", "loaded_tokens", "bypassed_calls", "failed_calls")
_LOADS = ("when_faster", "always")
_T = TypeVar("_T")


@dataclass
class _Prompt:
    """A prompt whose cache came from here. ``chain``: its hashes; ``kept``: chunks that need no store, by kind.

    ``tenant``: whose its values are. ``first_token``: measures what computing the rest takes.
    """

    ids: torch.Tensor
    chain: BlockHashChain
    adapters: str
    tenant: str
    kept: dict[str, int]
    first_token: FirstToken | None = None
    is_abandoned: bool = False


class PrefixCache:
    """Keeps the KV of a model's prompts in the tiers of a config. ``with`` it, or ``close`` it.

    ``config``: a file, or its content. ``model``: of transformers or PEFT, in eval mode, on its device. ``tokenizer``:
    for prompts that are text. ``chunk_tokens``: what is stored as one value; a prefix is restored in steps of it.
    ``state_tokens``: between two boundaries that keep states, which are large. ``weights``: "digest" reads all
    of them once; "commit" takes the hub's. ``salt``: prompts with different salts share nothing. ``tenant``: whose
    prompts they are where a call does not say it; "" for no one's. ``load``: "when_faster" computes a prefix where,
    as measured in this process, loading it would take longer; "always" loads all that is found. ``load_wait``: seconds
    that a prompt waits for the tiers, at most. ``pending_bytes``: of stores that wait; more is not stored.

    ConfigError, in one line, for a model whose KV cannot be restored rightly, and for mistakes of the config or a
    tenant that it does not allow. A call's own ``tenant`` is never an error: one that may not be runs without the
    cache, and the log says why.
    """

    def __init__(
        self,
        config: OffloadConfig | str | os.PathLike[str] | Mapping[str, Any],
        model: Any,
        tokenizer: Any = None,
        *,
        chunk_tokens: int = 256,
        state_tokens: int = 1024,
        weights: str = "digest",
        salt: str = "",
        tenant: str = "",
        load: str = "when_faster",
        load_wait: float = 5.0,
        pending_bytes: int = 1 << 30,
    ) -> None:
        if chunk_tokens < 1:
            raise ConfigError(f"chunk_tokens is {chunk_tokens}, expected at least 1")
        if load not in _LOADS:
            raise ConfigError(f"load is {load!r}, expected one of: {', '.join(_LOADS)}")
        refuse_model(model)
        self._model = model
        self._tokenizer = tokenizer
        self._config = text_config(model)
        self._chunk = chunk_tokens
        self._salt = salt
        self._load_wait = load_wait
        self._geometry = geometry = probe(model, self._config, chunk_tokens)
        self._guard = ModelGuard(model)
        identity = identity_of(model, geometry, weights)
        release = f"transformers-{transformers.__version__}"
        lengths = [kind.nbytes for kind in geometry.kinds]
        device = geometry.kinds[0].parts[0].device.type
        bounce = max(_BOUNCE_BYTES.get(device, _BOUNCE_BYTES["cpu"]), 4 * max(lengths))
        loaded = config if isinstance(config, OffloadConfig) else load_config(config)
        self._tenants, self._tenant = loaded.tenant_rule(), tenant
        self._client = open_client(
            loaded, identity, lengths, bounce_bytes=bounce, way_in="in transformers", release=release, tenant=tenant
        )
        self._rule = LoadOrCompute() if load == "when_faster" else None
        self._reader = Reader(self._client, geometry, self._config, self._rule)
        self._writer = Writer(self._client, pending_bytes, bounce // 4)
        self._prefill = Prefill(model, geometry, state_tokens)
        self._prompts: weakref.WeakKeyDictionary[Any, _Prompt] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._said: set[str] = set()

    # -- calls

    def generate(self, inputs: Any = None, *, tenant: str | None = None, **arguments: Any) -> Any:
        """Return what ``model.generate(inputs, **arguments)`` returns, with the prefixes that were found.

        ``inputs``: token ids, [prompts, tokens]; or, with a tokenizer, a text or a list of texts. Prompts of a batch
        are padded on the left, as ``attention_mask`` says. ``tenant``: whose prompts all of them are, by default the
        cache's. A call that the cache cannot serve is the model's alone, and the log says why, once.
        """
        if inputs is None:
            inputs = arguments.pop("input_ids", None)
        if self._tokenizer is not None and isinstance(inputs, str | list):
            inputs, arguments = self._tokens(inputs, arguments)
        cache = self._never_raises(lambda: self._prepare(inputs, arguments, tenant))
        if cache is None:
            return self._model.generate(inputs, **arguments)
        timed = self._never_raises(lambda: self._timed(cache, arguments)) or arguments
        found = self._model.generate(input_ids=inputs, cache=cache, **timed)
        if len(inputs) == 1 and cache in self._prompts:
            self._never_raises(lambda: self._measure(cache))
            self._never_raises(lambda: self._store(cache, getattr(found, "sequences", found)))
        return found

    def load(self, input_ids: torch.Tensor, *, tenant: str | None = None) -> DynamicCache:
        """Return a cache for ``model.generate(input_ids, cache=...)``: at the longest prefix that was found, or empty.

        ``input_ids``: one prompt, [1, tokens], without padding. At least its last token is left to be computed.
        ``tenant``: as for ``generate``; ``store`` stores for the same one.
        """
        return self._begin(input_ids, tenant, computes=False)

    def prefill(self, input_ids: torch.Tensor, *, tenant: str | None = None) -> DynamicCache:
        """Return such a cache, with what was not found computed up to the prompt's last boundary, and stored.

        For models with windows or states, whose boundaries cannot be kept when ``generate`` runs over them. Of another
        model it is ``load``: ``generate`` computes what was not found, and ``store`` stores it.
        """
        return self._begin(input_ids, tenant, computes=True)

    def store(self, cache: Any, ids: torch.Tensor) -> None:
        """Store what a cache from ``load`` or ``prefill`` has now. ``ids``: all of its tokens, and maybe more behind.

        The caller says by it that the model alone filled it, from these tokens, without masks or positions of its own.
        """
        self._never_raises(lambda: self._store(cache, ids))

    def flush(self, timeout: float = 60.0) -> bool:
        """Wait until all that was handed over is stored; False if it takes longer. ``generate`` never waits for it."""
        return self._writer.flush(timeout)

    def stats(self) -> dict[str, Any]:
        """Return counts since the cache was opened: tokens, calls, values; and the client's, under ``client``."""
        with self._lock:
            counts: dict[str, Any] = dict(self._counts)
        counts["skipped_loads"] = self._rule.skipped if self._rule else 0
        return counts | self._writer.counts() | {"client": self._client.stats()}

    def close(self, timeout: float = 30.0) -> None:
        """Store what waits, within so many seconds, and close the tiers. Later calls are the model's alone."""
        self._writer.close(timeout)
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- one call

    def _tokens(self, texts: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        found = self._tokenizer(
            texts if isinstance(texts, list) else [texts], return_tensors="pt", padding=True, padding_side="left"
        )
        ids, mask = (found[name].to(self._model.device) for name in ("input_ids", "attention_mask"))
        return ids, {"attention_mask": mask, **arguments}

    def _prepare(self, ids: Any, arguments: Mapping[str, Any], tenant: str | None) -> Any:
        """Return the cache for a call of ``generate``; None if it has to do without."""
        problem = problem_of(self._model.generation_config, ids, arguments) or self._guard.problem()
        pads = None if problem else left_padding(ids, arguments.get("attention_mask"))
        if problem or pads is None:
            return self._bypass(problem)
        prompts = [row[pad:] for row, pad in zip(ids, pads, strict=True)]
        if min(map(len, prompts)) < 2:
            return self._bypass("a prompt of one token")
        if (whose := self._whose(tenant)) is None:
            return None
        if len(prompts) == 1 and not pads[0]:
            return self._start(prompts[0], whose, computes=True)
        if any(pads) and self._geometry.has_indexer:
            return self._bypass("padding, of which the model's indexer picks tokens, too")
        # Alone, each of them ends where the batch begins: without padding, and one finds what the one before left.
        caches = []
        for prompt in prompts:
            caches.append(self._start(prompt, whose, computes=True))
            self._finish(prompt, caches[-1])
        return stack(self._geometry, self._config, caches, ids.shape[1] - 1)

    def _begin(self, ids: Any, tenant: str | None, *, computes: bool) -> Any:
        cache = self._never_raises(lambda: self._begin_one(ids, tenant, computes=computes))
        return cache if cache is not None else DynamicCache(config=self._config)

    def _begin_one(self, ids: torch.Tensor, tenant: str | None, *, computes: bool) -> Any:
        if problem := self._guard.problem():
            return self._bypass(problem)
        if ids.ndim != 2 or len(ids) != 1 or ids.shape[1] < 2:
            return self._bypass(f"load takes one prompt of two tokens or more, not {list(ids.shape)}")
        whose = self._whose(tenant)
        return None if whose is None else self._start(ids[0], whose, computes=computes)

    def _whose(self, tenant: str | None) -> str | None:
        """Return the tenant of a call, "" for none; None, which is logged and counted, for one that may not be."""
        whose = self._tenants.of({TENANT_FIELD: self._tenant if tenant is None else tenant})
        if whose is None:
            self._count(bypassed_calls=1)
        return whose

    def _start(self, ids: torch.Tensor, tenant: str, *, computes: bool) -> Any:
        """Return the cache of one prompt, restored, and, if need be, computed up to its last boundary."""
        adapters = active_adapters(self._model)
        digest = hashlib.sha256(adapters.encode()).hexdigest() if adapters else ""
        chain = BlockHashChain(self._chunk, adapter=digest, salt=self._salt)
        chain.extend(ids.cpu().numpy())
        most = (len(ids) - 1) // self._chunk
        cache, chunks = self._reader.restore(chain.hashes[:most], self._load_wait, tenant)
        if cache is None:
            cache = DynamicCache(config=self._config)
        self._count(prompts=1, prompt_tokens=len(ids), loaded_tokens=chunks * self._chunk)
        kept = dict.fromkeys((kind.name for kind in self._geometry.kinds), chunks)
        self._prompts[cache] = prompt = _Prompt(ids.detach().clone(), chain, adapters, tenant, kept)
        if self._rule:
            prompt.first_token = FirstToken(len(ids) - chunks * self._chunk, self._geometry.kinds[0].parts[0].device)
        if computes and self._geometry.at_boundaries:
            start = chunks * self._chunk
            stops = self._prefill.stops(start, len(ids) - 1)
            self._prefill.run(
                ids, cache, start, stops, lambda stop: self._keep(cache, prompt, stop, self._geometry.at_boundaries)
            )
            if stops:
                self._keep_rows(cache, prompt, stops[-1])
        return cache

    def _timed(self, cache: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return a call's arguments, and in them what sees the first token of a single prompt."""
        prompt = self._prompts.get(cache)
        if prompt is None or prompt.first_token is None:
            return arguments
        criteria = [prompt.first_token, *(arguments.get("stopping_criteria") or ())]
        return {**arguments, "stopping_criteria": StoppingCriteriaList(criteria)}

    def _measure(self, cache: Any) -> None:
        """Note for the rule what computing the rest of a prompt took."""
        first = self._prompts[cache].first_token
        seconds = first.seconds() if first else None
        if self._rule and first and seconds is not None:
            self._rule.computed(first.tokens, seconds)

    def _finish(self, ids: torch.Tensor, cache: Any) -> None:
        """Compute a prompt of a batch up to its last token but one, and store its chunks."""
        prompt, end = self._prompts[cache], len(ids) - 1
        start = _length(cache)
        if end > start:
            with torch.no_grad():
                self._prefill.forward(ids[start:end], cache)
        if not self._geometry.at_boundaries:
            self._keep_rows(cache, prompt, end)

    def _store(self, cache: Any, ids: torch.Tensor) -> None:
        prompt = self._prompts.get(cache) if isinstance(cache, DynamicCache) else None
        problem = self._guard.problem()
        if prompt is None:
            problem = "a cache that came from elsewhere cannot be stored"
        elif not problem and not _length(cache):
            return  # as load() has made it, and prefill() of a model whose boundaries generate() keeps: it has nothing
        elif not problem:
            problem = self._mismatch(cache, ids, prompt)
        if problem or prompt is None:
            self._bypass(problem)
            return
        ids = ids.reshape(-1)
        prompt.chain.extend(ids[len(prompt.ids) :].cpu().numpy())
        prompt.ids = ids.detach().clone()
        end = _length(cache)
        if not self._geometry.has_states:  # of states, those in the prompt were kept, at the stops of prefill()
            self._keep(cache, prompt, end, self._geometry.kinds)

    def _mismatch(self, cache: Any, ids: torch.Tensor, prompt: _Prompt) -> str:
        if (
            type(cache) is not DynamicCache
            or tuple(type(layer).__name__ for layer in cache.layers) != self._geometry.layers
        ):
            return "the cache is of another kind than the one that was loaded"
        if any(len(part.of(cache.layers[part.layer])) != 1 for kind in self._geometry.kinds for part in kind.parts):
            return "the cache has several sequences"
        ids = ids.reshape(-1)
        if len(ids) < max(_length(cache), len(prompt.ids)) or not torch.equal(ids[: len(prompt.ids)], prompt.ids):
            return "the tokens are others than those that the cache was loaded for"
        return "" if active_adapters(self._model) == prompt.adapters else "another adapter is active than at the load"

    # -- stores

    def _keep_rows(self, cache: Any, prompt: _Prompt, end: int) -> None:
        if self._geometry.rows is not None:
            self._keep(cache, prompt, end, [self._geometry.rows])

    def _keep(self, cache: Any, prompt: _Prompt, end: int, kinds: Sequence[ValueKind]) -> None:
        """Hand the values up to ``end`` tokens over that are in the cache, and were not before.

        Rows come last, and only as far as what else is needed there: beyond it they would be found in vain.
        """
        last = min(end // self._chunk, len(prompt.chain.hashes))
        for kind in sorted(kinds, key=lambda kind: kind.kind == "rows"):
            frozen = freeze(cache, _length(cache), kind)
            first = last - 1 if kind.kind == "state" else prompt.kept[kind.name]
            chunks = list(itertools.takewhile(lambda chunk: held(kind, frozen, chunk, self._chunk), range(first, last)))  # noqa: B023 -- used at once
            if chunks and not prompt.is_abandoned:
                keys = [key_of(prompt.chain.hashes[chunk], kind) for chunk in chunks]
                prompt.is_abandoned = not self._writer.submit(kind, frozen, chunks, keys, self._chunk, prompt.tenant)
                prompt.kept[kind.name] = chunks[-1] + 1
            if kind.kind == "window":
                last = min(last, prompt.kept[kind.name])

    # -- around all of it

    def _bypass(self, problem: str) -> None:
        self._count(bypassed_calls=1)
        if problem not in self._said:
            self._said.add(problem)
            _log.warning("transformers: without the cache: %s", problem)

    def _never_raises(self, call: Callable[[], _T]) -> _T | None:
        try:
            return call()
        except Exception as error:  # noqa: BLE001 -- never into generate() for the cache's sake
            self._count(failed_calls=1)
            _log.warning("transformers: the cache has failed, the model computes: %s: %s", type(error).__name__, error)
            _log.debug("transformers: where it failed", exc_info=True)
            return None

    def _count(self, **added: int) -> None:
        with self._lock:
            for name, number in added.items():
                self._counts[name] += number


def _length(cache: Any) -> int:
    return int(cache.get_seq_length())
