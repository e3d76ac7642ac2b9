"""kvtiers' eviction policies as cache policies of vLLM: which chunk leaves vLLM's own primary under its own tiering.

vLLM calls a policy when a transfer of a chunk begins and ends, and, with all that a request has used, when the request
ends. So a chunk becomes known to ours at the end of the request that has stored it, in the order of the prefix, head
first; until then it is evicted only where nothing else can be::

    insert -> unnamed  --its request ends, or nothing else can be evicted-->  known to the policy

A policy may come from elsewhere, so its answers are checked before a chunk leaves. After an error it is unclear what a
policy still holds: a new one takes its place, which learns the chunks, and what they are worth, from their next uses.
That costs a pass over all chunks on the engine's thread, so a policy may fail three times in an hour; the fourth error
within an hour brings LRU until the engine is started again.

vLLM stores all that is offered, so ``worth_storing`` is not asked. vLLM gets a class for each policy by its name:
``getattr`` of this module.
"""

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, ClassVar, TypeVar, cast

from vllm import __version__ as vllm_version

from kvtiers.api import ConfigError, OffloadKey
from kvtiers.primary.eviction import make_policy
from kvtiers.types import NO_HINTS, request_hints
from kvtiers_vllm.never_raise import BugCount
from kvtiers_vllm.own_tiering.tier_names import PREFIX
from kvtiers_vllm.releases import release_of

try:
    from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, order_request_keys
except ImportError:
    release_of(vllm_version)  # one that is not supported is refused by its name, not by that of what it lacks
    raise

__all__ = ["KvtiersCachePolicy"]

_log = logging.getLogger("kvtiers.vllm")
_LAST_RESORT = "lru"
_MOST_ERRORS, _WITHIN = 3, 3600.0  # seconds; a policy that fails at each call would cost a pass each time
_Method = TypeVar("_Method", bound=Callable[..., Any])


def __getattr__(name: str) -> "type[KvtiersCachePolicy]":
    """Return the class that evicts by the policy of this name."""
    if name.startswith("_"):
        raise AttributeError(name)
    return type(f"{PREFIX}{name}", (KvtiersCachePolicy,), {"policy_name": name})


def _replaces_a_broken_policy(method: _Method) -> _Method:
    """Make a method answer None where it would raise, and begin with a new policy: this one may be half changed."""

    @functools.wraps(method)
    def guarded(self: "KvtiersCachePolicy", *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception:  # noqa: BLE001 -- after any error the engine's step goes on
            self.bugs.note(method.__name__)
            self._replace_policy()
            return None

    return cast("_Method", guarded)


class KvtiersCachePolicy(CachePolicy):
    """The chunks of vLLM's primary, which leave as the policy called ``policy_name`` says.

    vLLM changes ``ref_cnt`` of a chunk: 0 while it may be evicted, below while it is stored, above while it is read.
    """

    policy_name: ClassVar[str]
    clock: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.bugs = BugCount(f"{PREFIX}{self.policy_name}")
        self._replaced = deque[float](maxlen=_MOST_ERRORS)  # when, the latest times
        self._is_last_resort = False
        self._policy = make_policy(self.policy_name, cache_capacity)
        self._chunks: dict[OffloadKey, Any] = {}
        self._unnamed: dict[OffloadKey, Any] = {}  # with vLLM's context of the request that stores it, if known
        self._missed: dict[OffloadKey, Any] = {}  # what running requests would store, with their contexts

    def get(self, key: OffloadKey) -> Any:
        """Return a chunk; None: it is not here."""
        return self._chunks.get(key)

    def insert(self, key: OffloadKey, chunk: Any, req_context: Any = None) -> None:
        """Add a chunk that is about to be stored; vLLM says by which request from 0.33 on, and before at its miss."""
        missed_by = self._missed.pop(key, None)
        self._chunks[key] = chunk
        self._unnamed[key] = missed_by if req_context is None else req_context

    @_replaces_a_broken_policy
    def remove(self, key: OffloadKey) -> None:
        """Remove a chunk whose store has failed."""
        del self._chunks[key]
        if key in self._unnamed:
            del self._unnamed[key]
        else:
            self._policy.remove([key])

    @_replaces_a_broken_policy
    def touch(self, keys: Iterable[OffloadKey], req_context: Any) -> None:
        """Count a use apart from what a request does."""
        del req_context
        known = [key for key in dict.fromkeys(keys) if key in self._chunks and key not in self._unnamed]
        self._policy.access(known, "")

    @_replaces_a_broken_policy
    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: Any) -> None:
        """Handle the absence of chunks that a request is about to store."""
        missed = list(keys)
        self._missed.update(dict.fromkeys(missed, req_context))
        self._policy.on_store_miss(missed, req_context.req_id)

    @_replaces_a_broken_policy
    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: Collection[OffloadKey],
        reused_keys: Collection[OffloadKey],
        req_context: Any,
    ) -> None:
        """Count what a request has used and stored, by the hints among its parameters, and settle its recency."""
        del insertion_only_keys, reused_keys
        keys = order_request_keys(key_groups, req_context)
        for key in keys if self._missed else ():
            self._missed.pop(key, None)
        self._hint(req_context)
        self._name([key for key in keys if key in self._chunks], req_context.req_id)
        self._policy.request_finished(req_context.req_id)

    @_replaces_a_broken_policy
    def evict(self, n: int, protected: Collection[OffloadKey]) -> list[tuple[OffloadKey, Any]] | None:
        """Evict exactly ``n`` chunks, none of which is protected; None, and no change, if there are fewer."""
        victims = self._evict(n, protected)
        while victims is None and self._name_more(n, protected):
            victims = self._evict(n, protected)
        return None if victims is None else [(key, self._chunks.pop(key)) for key in victims]

    @_replaces_a_broken_policy
    def clear(self) -> None:
        """Forget everything."""
        self._chunks.clear()
        self._unnamed.clear()
        self._missed.clear()
        self._policy.clear()

    @_replaces_a_broken_policy
    def mark_evictable(self, key: OffloadKey) -> None:
        """Allow a chunk to be evicted."""
        if key not in self._unnamed:
            self._policy.mark_evictable([key])

    @_replaces_a_broken_policy
    def mark_non_evictable(self, key: OffloadKey) -> None:
        """Forbid the eviction of a chunk."""
        if key not in self._unnamed:
            self._policy.mark_pinned([key])

    def _evict(self, count: int, protected: Collection[OffloadKey]) -> list[OffloadKey] | None:
        spared = [key for key in protected if self._may_leave(key)]
        if spared:
            self._policy.mark_pinned(spared)
        try:
            victims = self._policy.evict(count)
        finally:
            if spared:
                self._policy.mark_evictable(spared)
        if victims is not None:
            self._check(victims, count, protected)
        return victims

    def _check(self, victims: Sequence[OffloadKey], count: int, protected: Collection[OffloadKey]) -> None:
        """Raise ValueError unless these are as many chunks as were asked for, all of which may leave."""
        if len(victims) != count or len(set(victims)) != count:
            raise ValueError(
                f"asked for {count} chunks, it named {len(victims)}, {len(set(victims))} of them different"
            )
        if not all(key not in protected and self._may_leave(key) for key in victims):
            raise ValueError("it named a chunk that may not leave")

    def _name_more(self, count: int, protected: Collection[OffloadKey]) -> bool:
        """Make more chunks known to the policy, some of which may leave; False: there are none.

        Those of which no request is known come first, each as if it had been used alone, the last stored one first: it
        may be the tail of another. Then those of one running request.
        """
        chunks, unnamed = self._chunks, self._unnamed

        def idle(keys: Iterable[OffloadKey]) -> Iterator[OffloadKey]:
            return (key for key in keys if chunks[key].ref_cnt == 0 and key not in protected)

        if alone := list(islice(idle(key for key in reversed(unnamed) if unnamed[key] is None), count)):
            for key in alone:
                self._name([key], "")
            return True
        if (first := next(idle(unnamed), None)) is None:
            return False
        context = unnamed[first]
        self._hint(context)
        own = [key for key, other in unnamed.items() if other is not None and other.req_id == context.req_id]
        self._name(order_request_keys([own], context), context.req_id)
        return True

    def _hint(self, req_context: Any) -> None:
        """Pass on what the client says of a request."""
        if (hints := request_hints(req_context.kv_transfer_params or {})) is not NO_HINTS:
            self._policy.hint(req_context.req_id, hints)

    def _replace_policy(self) -> None:
        """Begin with a new policy, to which no chunk is known; keep this one if there can be no other.

        After more than ``_MOST_ERRORS`` in an hour it is LRU, which stays: another error has no cause in the policy.
        """
        if self._is_last_resort:
            return
        name, now = self.policy_name, self.clock()
        if len(self._replaced) == _MOST_ERRORS and now - self._replaced[0] < _WITHIN:
            text = "%s: it has failed %d times in an hour; chunks leave by LRU until the engine is started again"
            _log.error(text, f"{PREFIX}{name}", _MOST_ERRORS + 1)
            name, self._is_last_resort = _LAST_RESORT, True
        self._replaced.append(now)
        with suppress(ConfigError):
            self._policy = make_policy(name, self.cache_capacity)
            self._unnamed = {key: self._unnamed.get(key) for key in self._chunks}

    def _may_leave(self, key: OffloadKey) -> bool:
        chunk = self._chunks.get(key)
        return chunk is not None and chunk.ref_cnt == 0 and key not in self._unnamed

    def _name(self, keys: Sequence[OffloadKey], request_id: str) -> None:
        """Count a use of these chunks, some of which are new to the policy."""
        new = [key for key in keys if key in self._unnamed]
        self._policy.access(keys, request_id, new)
        for key in new:
            del self._unnamed[key]
        if idle := [key for key in new if self._may_leave(key)]:
            self._policy.mark_evictable(idle)
