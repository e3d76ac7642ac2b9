"""The config models: sizes in bytes, durations in seconds, shares as fractions."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, PrivateAttr, SerializeAsAny, field_validator, model_validator

from kvtiers.api import ConfigError, Duration, Share, Size, StrictModel, TierConfig
from kvtiers.api.config import LIVE
from kvtiers.api.units import DURATION, parse_duration
from kvtiers.config.tenants import TenantsConfig
from kvtiers.encryption.config import EncryptionConfig, refuse_key
from kvtiers.layout.storage_name import check_namespace
from kvtiers.layout.tenants import Tenants
from kvtiers.region.memfd import DEFAULT_WINDOW, MOST_NODES, HugePages, PrefaultMode

__all__ = [
    "BudgetConfig",
    "EventTierConfig",
    "EventsConfig",
    "ModelConfig",
    "OffloadConfig",
    "PrimaryConfig",
    "RecordConfig",
]

_TCP = re.compile(r"tcp://([^\s/:@]+|\[[0-9a-fA-F:.*]+\]):([0-9]{1,5})")
_ABSTRACT = re.compile(r"ipc://@[\x21-\x7e]{1,90}")
_LAST_PORT = 65_535
_MOVING_REVISIONS = {"main", "master", "head", "latest"}


def _huge_pages(value: object) -> object:
    # YAML reads a bare `off` as false, and `on` as true.
    return {False: "off", True: "2MiB"}[value] if isinstance(value, bool) else value


def _prefault(value: object) -> object:
    # A bare `on` or `off` is a boolean in YAML.
    return {False: "off", True: "ahead"}[value] if isinstance(value, bool) else value


def _auto_or_duration(value: object) -> object:
    if value == "auto":
        return value
    try:
        return parse_duration(value)
    except ValueError as error:
        raise ValueError(f"{error}; or 'auto'") from None


LoadWait: TypeAlias = Annotated[Literal["auto"] | Annotated[float, DURATION], BeforeValidator(_auto_or_duration)]


class ModelConfig(StrictModel):
    """The model whose KV this is. An adapter fills in most of it; fields that both name must be equal."""

    name: str = Field(min_length=1, description="the model, as its engine names it")
    revision: str | None = Field(
        default=None, min_length=1, description="what names these very weights: a commit, or a digest of the files"
    )
    kv_dtype: str | None = Field(default=None, description="type of one number in the KV cache, such as bfloat16")
    kv_scales: str | None = Field(default=None, description="scales of a quantised KV cache, or a digest of them")
    rope: str | None = Field(default=None, description="rotary embedding, where it differs from the model's own")
    quantization: str | None = Field(default=None, description="quantisation of the weights")
    kv_layout: str | None = Field(default=None, description="order of the numbers in a page, by attention backend")
    hash_algorithm: str | None = Field(default=None, description="how the engine chains its block hashes")
    hash_seed: str | None = Field(default=None, description="seed of the first block's hash")
    hash_bytes: int | None = Field(default=None, ge=1, le=64, description="length of a block hash")

    @field_validator("revision")
    @classmethod
    def _stands_still(cls, revision: str | None) -> str | None:
        if revision and revision.lower() in _MOVING_REVISIONS:
            raise ValueError(f"{revision!r} moves with the next upload; give the commit, or a digest of the weights")
        return revision

    def identity(self) -> dict[str, Any]:
        """Return what is given here, by the field names of ``layout.cache_layout.ModelIdentity``."""
        given = self.model_dump(exclude_none=True)
        if "revision" in given:
            given["weights"] = given.pop("revision")
        return given


class PrimaryConfig(StrictModel):
    """The CPU memory that all workers share."""

    capacity: Size = Field(gt=0, description="memory for chunks, all workers together")
    pool: str | None = Field(
        default=None,
        pattern=r"^/.{1,105}$",
        description="socket of a keeper on this machine ('kvtiers pool serve'), whose memory outlives the engine; its "
        "size is the keeper's. Where there is none to be had, the engine has memory of its own, as without this",
    )
    eviction: str = Field(
        default="lru",
        description="which chunk is evicted first: lru, arc, turn-hazard (of kvtiers-policies: learns when "
        "conversations come back), or another installed policy",
    )
    huge_pages: Annotated[HugePages, BeforeValidator(_huge_pages)] = Field(
        default="off", description="huge pages, which the administrator has to reserve"
    )
    numa_node: int | None = Field(
        default=None, ge=0, lt=MOST_NODES, description="NUMA node whose memory is preferred; best the GPU's"
    )
    prefault: Annotated[PrefaultMode, BeforeValidator(_prefault)] = Field(
        default="ahead",
        description="when memory is touched and pinned: ahead of use, in the background; all at start, which waits for "
        "it; or off, at its first use",
    )
    prefault_window: Size = Field(
        default=DEFAULT_WINDOW, gt=0, description="with 'prefault: ahead', how much memory is ready ahead of use"
    )
    pin_share: Share = Field(
        default=0.10, gt=0, description="share of a GPU driver's time for pinning memory while the engine works"
    )
    pin_piece: Duration = Field(
        default=0.002,
        gt=0,
        description="longest time that a pinning call holds a GPU's driver: launches wait for it",
    )
    start_deadline: Duration = Field(default=60.0, gt=0, description="how long all ranks have to join")
    core_dumps: bool = Field(
        default=False, description="core files contain the chunks, from which prompts can be recovered"
    )


class BudgetConfig(StrictModel):
    """Shares of the primary's rows that may be held for one purpose; each is rounded up to at least one row."""

    store_reserve: Share = Field(
        default=0.10, description="rows kept for stores, which promotions may not take", json_schema_extra=LIVE
    )
    all_tiers: Share = Field(
        default=0.50, description="most rows that all tiers together may pin", json_schema_extra=LIVE
    )
    one_tier: Share = Field(default=0.25, description="most rows that one tier may pin", json_schema_extra=LIVE)
    protected: Share = Field(default=0.40, description="most promoted rows that are kept until they are read")
    protect_for: Duration = Field(default=10.0, description="longest time that such a row is kept")
    kept: Share = Field(
        default=0.50, description="most rows that hints of requests (ttl, priority) keep; 0: hints keep none"
    )

    @model_validator(mode="after")
    def _fit(self) -> "BudgetConfig":
        total = self.store_reserve + self.all_tiers + self.protected
        if total > 1 + 1e-9:
            parts = [
                f"{name} ({getattr(self, name) * 100:.4g}%)" for name in ("store_reserve", "all_tiers", "protected")
            ]
            raise ValueError(f"{', '.join(parts)} are {total * 100:.4g}% together, expected at most 100%")
        return self


class RecordConfig(StrictModel):
    """A recording of the engine's requests: lengths and keyed hashes, as ``kvtiers plan --trace`` reads them."""

    path: str = Field(min_length=1, description="file to write; where it exists, -1, -2 ... come before its ending")
    max_bytes: Size = Field(default=1 << 30, gt=0, description="size at which the recording ends")


class TracingConfig(StrictModel):
    """Spans of sampled requests' lookups, loads and stores, for OpenTelemetry; needs the extra ``kvtiers[otel]``."""

    sample: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="share of the requests that have no trace context; one that has is in the sample if that says so",
    )
    endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://\S+$",
        description="URL to which spans are sent by OTLP over HTTP, with its path (/v1/traces); "
        "default: OpenTelemetry's own environment variables",
    )


class EventTierConfig(StrictModel):
    """What KV events say of a tier."""

    medium: str = Field(
        default="STORAGE", min_length=1, description="medium of the tier's events; routers weight blocks by it"
    )
    locality: Literal["LOCAL", "REMOTE"] | None = Field(
        default=None,
        description="LOCAL: only this machine has the tier; REMOTE: others share it; default: by the tier's type",
    )


class EventsConfig(StrictModel):
    """KV events for routers, as vLLM publishes them: ZMQ, msgpack, with a buffer for replays."""

    endpoint: str = Field(
        default="tcp://*:5557",
        description="ZMQ endpoint of the events; as in vLLM one with '*' or '::' is bound, any other connected to",
    )
    bind: bool | None = Field(default=None, description="bind the endpoint, or connect to it; default: by its form")
    replay_endpoint: str | None = Field(
        default=None, description="ZMQ endpoint to bind, at which a subscriber asks for batches again"
    )
    topic: str = Field(default="", description="topic of each message; llm-d expects kv@POD@MODEL")
    buffer_steps: int = Field(default=10_000, ge=0, description="batches kept for replays")
    buffer_bytes: Size = Field(default=64 << 20, ge=0, description="most bytes of the batches kept for replays")
    max_waiting: int = Field(
        default=100_000, ge=1, description="blocks whose events wait to be sent; the oldest of more are dropped"
    )
    hwm: int = Field(default=10_000, ge=100, description="batches that wait for one slow subscriber; it loses others")
    hashes: Literal["int", "bytes"] = Field(
        default="int", description="block hashes as their last 64 bits, as vLLM's default is, or whole"
    )
    encoding: Literal["map", "array"] = Field(
        default="map", description="an event by its fields' names, as vLLM 0.30 and later write it, or by their order"
    )
    tokens: bool = Field(default=True, description="publish token ids, by which routers index blocks")
    ownership: bool = Field(
        default=True, description="name the tier, as vLLM's 'ownership'; Dynamo's router leaves out events that do"
    )
    tiers: Mapping[str, EventTierConfig] = Field(default={}, description="what events say of a tier, by its name")

    @field_validator("endpoint", "replay_endpoint")
    @classmethod
    def _can_be_opened(cls, endpoint: str | None) -> str | None:
        if endpoint is None or _ABSTRACT.fullmatch(endpoint):
            return endpoint
        if (tcp := _TCP.fullmatch(endpoint)) and int(tcp[2]) <= _LAST_PORT:
            return endpoint
        if endpoint.startswith("ipc://"):
            raise ValueError(
                f"{endpoint!r} is a socket file, which stays behind when the engine is killed; expected a socket "
                "without one, such as 'ipc://@kvtiers-events'"
            )
        raise ValueError(f"expected tcp://HOST:PORT, such as 'tcp://*:5557', or ipc://@NAME, got {endpoint!r}")


class OffloadConfig(StrictModel):
    """A whole config, as ``load_config`` returns it: each secondary tier is an instance of its plugin's own model."""

    version: Literal[1] = Field(description="version of this file format")
    namespace: str = Field(default="default", description="first part of every storage name")
    model: ModelConfig | None = Field(default=None, description="the model, where no adapter fills it in")
    primary: PrimaryConfig = Field(description="the CPU tier")
    secondary: tuple[SerializeAsAny[TierConfig], ...] = Field(default=(), description="the tiers below, in this order")
    encryption: EncryptionConfig | None = Field(
        default=None, description="encrypt what the tiers hold, and the names of it, with a key of this namespace"
    )
    lookup_wait: Duration = Field(
        default=0.02,
        description="longest wait of a request for a tier's answer; with 'load_wait: auto' at least 15% of what "
        "computing its prompt takes, 110% while the tier loads",
        json_schema_extra=LIVE,
    )
    load_wait: LoadWait = Field(
        default="auto",
        description="longest wait of a request for a promotion; auto: as long as recomputing takes",
        json_schema_extra=LIVE,
    )
    start_wait: Duration = Field(
        default=1.0, ge=0, description="longest wait of the start for the first pinned memory and for tiers to open"
    )
    budgets: BudgetConfig = Field(default_factory=BudgetConfig, description="shares of the primary's rows")
    clean_reserve: Share = Field(
        default=0.05, description="rows kept free or clean, ahead of need, for tiers with 'admission: on_eviction'"
    )
    record: RecordConfig | None = Field(default=None, description="record the engine's requests, without their tokens")
    tracing: TracingConfig | None = Field(default=None, description="send spans of sampled requests to OpenTelemetry")
    events: EventsConfig | None = Field(default=None, description="publish KV events, for llm-d's and Dynamo's routers")
    what_if: bool = Field(
        default=False,
        description="shadow caches of keys alone, for 'kvtiers status --what-if'; about 0.5% of a core, some 90 MiB",
    )

    tenants: TenantsConfig | None = Field(
        default=None, description="tenants that share no values, and their shares of the primary"
    )

    _source: str = PrivateAttr(default="")

    @field_validator("encryption", mode="before")
    @classmethod
    def _is_no_key(cls, encryption: object) -> object:
        return refuse_key(encryption, "a mapping with 'key'")

    @property
    def source(self) -> str:
        """The path of the file that this config was read from, "" if it was none."""
        return self._source

    def tenant_rule(self) -> Tenants:
        """Return the rule by which requests have tenants."""
        return Tenants(self.namespace, is_on=False) if self.tenants is None else self.tenants.rule(self.namespace)

    @field_validator("namespace")
    @classmethod
    def _can_stand_in_a_name(cls, namespace: str) -> str:
        try:
            return check_namespace(namespace)
        except ConfigError as error:
            raise ValueError(str(error).removeprefix("namespace ")) from None

    @model_validator(mode="after")
    def _events_name_tiers(self) -> "OffloadConfig":
        known = [tier.tier_name for tier in self.secondary]
        for name in self.events.tiers if self.events is not None else ():
            if name not in known:
                there = ", ".join(known) or "none"
                raise ValueError(f"'events.tiers' names {name!r}, which is no tier of this config; there are: {there}")
        return self
