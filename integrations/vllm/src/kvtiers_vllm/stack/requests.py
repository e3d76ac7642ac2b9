"""The open requests of vLLM, and the identity of their KV: the mapping from vLLM's keys to kvtiers'.

A request without ``keys`` uses no tiers, since the identity of its KV is uncertain. That is permanent
if vLLM has not shown it, has given a block of it another hash than before, or offers other blocks of it than it has
hashed (``releases.py``), if its adapter's files cannot be read or have changed, or if part of it was computed with
other weights, also if vLLM has that part in its own prefix cache. It is temporary while its adapter's files are being
examined: vLLM defers it, no longer than ``lookup_wait``.
"""

import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvtiers.api import ConfigError
from kvtiers.layout.tenants import Tenants
from kvtiers.types import TENANT_FIELD, PromptGroup, RequestContext
from kvtiers_vllm.engine import CoreLink
from kvtiers_vllm.request_field import RequestField, tenant_param
from kvtiers_vllm.stack.adapter_digests import AdapterDigests, DigestRequest, Standing
from kvtiers_vllm.stack.keys import GroupKeys, RequestKeys

__all__ = ["OpenRequest", "RequestBook", "WeightUpdates", "Weights"]

_log = logging.getLogger("kvtiers.vllm")
_MOST_AHEAD = 4_096
_STORES_WAIT = 5.0  # vLLM asks in each step, and logs that it was refused
_CHANGES = {
    "reload_weights",
    "start_draft_weight_update",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
}
"""The methods of vLLM's workers that change weights, by their names in ``collective_rpc``."""


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request. ``out``: it has no keys, for good. ``load_failed``: it gets no hits until it was preempted."""

    context: RequestContext
    make_keys: Callable[[bytes], RequestKeys]
    digesting: DigestRequest | None = None
    """At its adapter; None: it has none."""
    out: bool = False
    has_local_prefix: bool = False
    """vLLM has part of it in its own prefix cache, which does not look at adapters' files."""
    load_failed: bool = False
    load: tuple[int, int] = (0, 0)
    """From where to where its prompt was to be loaded when that was decided last, in tokens."""
    prompt_tokens: int = 0
    """0 where vLLM does not say."""
    waits_since: float | None = None
    shown: Any = None
    """vLLM's own request."""
    described: int = 0
    """Its first so many tokens' chunks have been described for KV events."""
    _keys: RequestKeys | None = None

    @property
    def keys(self) -> RequestKeys | None:
        """Its keys; None where they are uncertain, or not made yet."""
        if self.digesting is not None and not self._follow_adapter(self.digesting):
            return None
        if self._keys is None and not self.out:
            self._keys = self.make_keys(self.digesting.digest if self.digesting is not None else b"")
        self.out = self.out or (self._keys is not None and not self._keys.still_hold())
        return None if self.out else self._keys

    def names(self, keys: RequestKeys, shown: Collection[bytes]) -> bool:
        """Return whether vLLM hashes blocks of the request by these keys now; if not, the request is out.

        vLLM's connector has a list of keys of its own, which is not shortened when a session discards tokens.
        """
        self.out |= not keys.are_all_of(shown)
        return not self.out

    def output_tokens(self) -> int:
        """Return how many tokens its answer has so far; 0 where vLLM does not say."""
        return int(getattr(self.shown, "num_output_tokens", None) or 0)

    def use(self, keys: RequestKeys) -> None:
        """Use keys that were made ahead."""
        self._keys = keys

    def _follow_adapter(self, digesting: DigestRequest) -> bool:
        standing = digesting.standing
        self.out |= standing is Standing.CHANGED or (self.has_local_prefix and digesting.was_another)
        return standing is Standing.KNOWN


@dataclass(frozen=True, slots=True)
class Weights:
    """The version of the weights at the start, and vLLM's current one.

    ``resets``: how often vLLM has emptied its own prefix cache.
    """

    name: str
    version: Callable[[], Any]
    resets: Callable[[], int]


class RequestBook:
    """The open requests. ``groups``: how keys come about. ``lookup_wait``: seconds for an answer, once a request.

    ``tenants``: who a request's tenant is; one whose tenant may use no tier is out. The caller ends ``digests``.
    ``offloads_rightly``: whether this release of vLLM offers the blocks of a request that it has hashed; else it is
    out. ``spoils_cache``: whether vLLM's own prefix cache is not to be trusted from this request on.
    """

    def __init__(
        self,
        groups: Mapping[int, GroupKeys],
        weights: Weights,
        digests: AdapterDigests,
        lookup_wait: float,
        clock: Callable[[], float] = time.monotonic,
        tenants: Tenants | None = None,
        offloads_rightly: Callable[[Any], bool] = lambda _request: True,
        spoils_cache: Callable[[Any], bool] = lambda _request: False,
    ) -> None:
        self._spoils_cache = spoils_cache
        self._cache_is_spoiled = False
        self._offloads_rightly = offloads_rightly
        self._tenants = tenants or Tenants("", is_on=False)
        self.groups = len(groups)
        """KV groups of the model."""
        self._groups = groups
        self._weights = weights
        self._lookup_wait = lookup_wait
        self._clock = clock
        self._version = weights.version()
        self._resets = weights.resets()
        self._has_computed = False
        """Since vLLM has emptied its own prefix cache, which may hold what was computed."""
        self._cache_is_old = False
        """vLLM's own prefix cache may hold KV of other weights than those of now."""
        self._digests = digests
        self.field = RequestField()
        self._shown: Any = None
        self._open: dict[str, OpenRequest] = {}
        self._ahead: OrderedDict[str, tuple[Any, RequestKeys]] = OrderedDict()
        """vLLM's request and its keys, made when it came and used when it is opened. Filled on another thread.

        Requests that are aborted before they are opened stay until they are the oldest of ``_MOST_AHEAD``.
        """

    def show(self, request: Any) -> None:
        """Record vLLM's request, which is named next."""
        self._shown = request

    def open(self, request_id: str, params: Mapping[str, object] | None) -> OpenRequest:
        """Record a request that vLLM names."""
        shown, self._shown = self._shown, None
        if shown is not None and shown.request_id != request_id:
            shown = None
        params = self.field.params(params)
        tenant = self._tenants.of(params, _salt_of(shown))
        if tenant and TENANT_FIELD not in params:
            params = {**params, TENANT_FIELD: tenant}
        context, maker = RequestContext(request_id, params, _traceparent(shown)), self._maker_of(shown, tenant or "")
        request = OpenRequest(context, maker, out=shown is None or tenant is None)
        request.out |= shown is not None and not self._offloads_rightly(shown)
        if shown is not None and self._spoils_cache(shown):
            self._spoil_cache()
        ahead = self._ahead.pop(request_id, None)
        if ahead is not None and ahead[0] is shown:
            request.use(ahead[1])
        request.shown = shown
        request.prompt_tokens = int(getattr(shown, "num_prompt_tokens", None) or 0)
        if shown is not None and shown.lora_request is not None:
            request.digesting = self._digests.begin(shown.lora_request)
        self._open[request_id] = request
        return request

    def needs(self, windows: Mapping[int, tuple[int, int]]) -> None:
        """Take what vLLM needs of each group, by its number, for a load: ``window`` and ``ahead`` of ``GroupKeys``."""
        self._groups = {
            number: replace(group, window=windows[number][0], ahead=windows[number][1])
            for number, group in self._groups.items()
        }

    def announced(self, shown: Any) -> list[PromptGroup]:
        """Return the keys by which vLLM will look a request up; none if something is to be found out first."""
        if shown.lora_request is None and self._offloads_rightly(shown):
            try:
                named = tenant_param(getattr(shown, "kv_transfer_params", None))
                tenant = self._tenants.named(named, _salt_of(shown))
            except ConfigError:  # said when it is opened
                return []
            keys = self._maker_of(shown, tenant)(b"")
            if not getattr(shown, "resumable", False):  # the later inputs of a session are never opened
                self._ahead[shown.request_id] = (shown, keys)
                if len(self._ahead) > _MOST_AHEAD:
                    self._ahead.popitem(last=False)
            return keys.groups()
        return []

    def get(self, request_id: str) -> OpenRequest | None:
        """Return an open request."""
        return self._open.get(request_id)

    def close(self, request_id: str) -> OpenRequest | None:
        """Forget a request, and return it."""
        self._ahead.pop(request_id, None)
        return self._open.pop(request_id, None)

    def block_hashes(self, request: OpenRequest) -> list[Sequence[bytes]]:
        """Return vLLM's hash of each block of a request so far, by the layout's groups."""
        hashes = list(request.shown.block_hashes) if request.shown is not None else []
        groups = sorted(self._groups.values(), key=lambda group: group.index)
        return [hashes[group.hashes_per_block - 1 :: group.hashes_per_block] for group in groups]

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(self._open.values())

    def has_local_prefix(self, request_id: str, tokens: int) -> None:
        """Record how much of a request vLLM has in its own prefix cache, before it is looked up."""
        request = self._open.get(request_id)
        if request is not None and tokens:
            request.has_local_prefix = True
            request.out |= self._cache_is_old or self._cache_is_spoiled

    def _spoil_cache(self) -> None:
        if not self._cache_is_spoiled:
            self._cache_is_spoiled = True
            _log.warning(
                "a session with streaming input has come, of which this release of vLLM may keep KV under the hash of "
                "other tokens: it uses no tier, and until vLLM's own prefix cache is reset (reset_prefix_cache) nor do "
                "requests that find a part of their prompt there; vLLM 0.32 and later ones do not keep it"
            )

    def computes(self) -> None:
        """Record that vLLM computes or loads something, with the weights that ``new_weights`` has seen."""
        self._has_computed = True

    def holds_back(self, request_id: str) -> bool:
        """Return whether vLLM has to defer a request, since its adapter has no digest yet; not for long."""
        request = self._open.get(request_id)
        if request is None or request.digesting is None:
            return False
        if request.keys is None and self._waits(request, self._lookup_wait):
            return True
        request.digesting.vllm_may_load()
        return False

    def stores_wait(self, request: OpenRequest) -> bool:
        """Return whether the stores of a request without keys wait for them, which delays no other; else it is out."""
        request.out = not self._waits(request, _STORES_WAIT)
        return not request.out

    def _waits(self, request: OpenRequest, seconds: float) -> bool:
        if request.out:
            return False
        now = self._clock()
        if request.waits_since is None:
            request.waits_since = now
        return now - request.waits_since < seconds

    def new_weights(self) -> str | None:
        """Return the version of changed weights, and take open requests out; None while the weights are the same."""
        if (resets := self._weights.resets()) != self._resets:
            self._resets = resets
            self._has_computed = self._cache_is_old = False
            self._cache_is_spoiled = any(self._spoils_cache(request.shown) for request in self._open.values())
        version = self._weights.version()
        if version == self._version:
            return None
        self._version = version
        if self._has_computed and not self._cache_is_old:
            _log.warning(
                "the weights have changed, and vLLM's own prefix cache may hold KV of the earlier ones: until it is "
                "reset (reset_prefix_cache), requests that find a part of their prompt there use no tier"
            )
            self._cache_is_old = True
        for request in self._open.values():
            request.out = True
        return f"{self._weights.name}@{version}"

    def _maker_of(self, shown: Any, tenant: str) -> Callable[[bytes], RequestKeys]:
        hashes = shown.block_hashes if shown is not None else ()
        return partial(RequestKeys, self._groups, hashes, salt=_salt_of(shown), tenant=tenant)


def _salt_of(shown: Any) -> str:
    return (shown.cache_salt or "") if shown is not None else ""


class WeightUpdates:
    """Which weights an engine has, by the calls of vLLM's that change them. ``core``: the link to vLLM's engine core.

    ::

        reload_weights(), update_weights(...)                        weights without a name: their KV is not shared
        finish_weight_update(version), update_weight_version(...)    weights of this version
        reset_prefix_cache(...)                                      vLLM's own cache holds no KV of earlier ones
    """

    def __init__(self, core: CoreLink) -> None:
        self._core = core
        self._unnamed = ""
        self.resets = 0
        """The number of times that vLLM has emptied its own prefix cache."""
        core.workers_called.append(self._called)
        core.weights_named.append(self._named)
        core.cache_reset.append(self._reset)

    def version(self) -> str:
        """Return the version of the current weights; another one after each change."""
        return f"{self._core.weights_version()}{self._unnamed}"

    def _called(self, method: Any) -> None:
        if isinstance(method, str) and method in _CHANGES:
            self._unnamed = f"+{secrets.token_hex(16)}"

    def _named(self) -> None:
        self._unnamed = ""

    def _reset(self) -> None:
        self.resets += 1


def _traceparent(shown: Any) -> str:
    """Return the trace context that came with vLLM's request, as its HTTP header has it."""
    found = (getattr(shown, "trace_headers", None) or {}).get("traceparent", "")
    return found if isinstance(found, str) else ""
