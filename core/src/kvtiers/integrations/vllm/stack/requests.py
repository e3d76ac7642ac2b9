"""The requests that vLLM has named, and whose KV theirs is: what stands between vLLM's keys and ours.

A request without ``keys`` has nothing to do with tiers, since nobody can tell what its KV is: vLLM has not shown it,
its adapter's files are not known or have changed, or part of it was computed with other weights.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvtiers.base import PrefixHits, RequestContext
from kvtiers.integrations.vllm.stack.adapters import Adapters
from kvtiers.integrations.vllm.stack.keys import GroupKeys, RequestKeys

__all__ = ["OpenRequest", "RequestBook", "Run", "Weights"]


class Run(NamedTuple):
    """What is known of a prefix from its chunk number ``first`` on."""

    first: int
    hits: PrefixHits


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request. ``load_failed``: it is computed, and hits nothing any more."""

    context: RequestContext
    keys: RequestKeys | None
    adapter_id: int = 0
    load_failed: bool = False
    runs: dict[int, Run] = field(default_factory=dict)
    """This step's answers, by group."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What the weights are called at start, and vLLM's word for those that it has now."""

    name: str
    version: Callable[[], Any]


class RequestBook:
    """The open requests. ``groups``: how keys come about."""

    def __init__(self, groups: Mapping[int, GroupKeys], weights: Weights) -> None:
        self._groups = groups
        self._weights = weights
        self._version = weights.version()
        self._adapters = Adapters()
        self._shown: Any = None
        self._open: dict[str, OpenRequest] = {}

    def show(self, request: Any) -> None:
        """Take note of vLLM's request, which is named next."""
        self._shown = request

    def open(self, request_id: str, params: Mapping[str, object] | None) -> OpenRequest:
        """Take note of a request that vLLM names."""
        shown, self._shown = self._shown, None
        if shown is not None and shown.request_id != request_id:
            shown = None
        lora = getattr(shown, "lora_request", None)
        request = OpenRequest(
            RequestContext(request_id, params or {}), self._keys_of(shown, lora), lora.lora_int_id if lora else 0
        )
        self._open[request_id] = request
        return request

    def get(self, request_id: str) -> OpenRequest | None:
        """Return an open request."""
        return self._open.get(request_id)

    def close(self, request_id: str) -> OpenRequest | None:
        """Forget a request, and return it."""
        return self._open.pop(request_id, None)

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(self._open.values())

    def has_local_prefix(self, request_id: str) -> None:
        """Take note that vLLM has part of a request in its own prefix cache, which does not look at adapters' files."""
        request = self._open.get(request_id)
        if request is not None and request.adapter_id in self._adapters.reloaded:
            request.keys = None

    def new_weights(self) -> str | None:
        """Return what other weights than before are called; None while they are the same. Open requests are out."""
        version = self._weights.version()
        if version == self._version:
            return None
        self._version = version
        for request in self._open.values():
            request.keys = None
            request.runs.clear()
        return f"{self._weights.name}@{version}"

    def _keys_of(self, shown: Any, lora: Any) -> RequestKeys | None:
        if shown is None:
            return None
        digest: bytes | None = b""
        if lora is not None:
            digest = self._adapters.digest(lora)
            if self._adapters.has_changed(lora.lora_int_id):
                for request in self._open.values():
                    if request.adapter_id == lora.lora_int_id:
                        request.keys = None  # part of it was computed with the adapter as it was
        if digest is None:
            return None
        return RequestKeys(self._groups, shown.block_hashes, digest, shown.cache_salt or "")
