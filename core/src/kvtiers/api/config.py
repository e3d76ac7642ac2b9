"""The configuration of one tier, as one flat model: the options that every tier has, and the author's own.

An author subclasses ``TierConfig`` and adds fields. Unknown options are errors, a validated config never changes,
``${NAME}`` in any text is read from the environment, and a ``Secret`` never prints.
"""

import os
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    JsonValue,
    SerializationInfo,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from kvtiers.api.files import read_file
from kvtiers.api.keys import TENANT
from kvtiers.api.units import RESOLVED, Duration, Share, Size, format_size

__all__ = [
    "HOST_OPTIONS",
    "Admission",
    "BreakerConfig",
    "Compression",
    "Quotas",
    "RateLimit",
    "Secret",
    "StrictModel",
    "TierConfig",
    "dump_resolved",
    "load_resolved",
    "quota_of",
]

_VARIABLE = re.compile(r"\$\{([^}]*)(\}?)")
_MOST_PROCESSES = 16
LIVE: dict[str, JsonValue] = {"live": True}
"""Marks an option that ``kvtiers ctl reload`` applies to a running engine (``json_schema_extra``)."""
HOST_OPTIONS = frozenset(
    {
        "compression", "cpus", "exists_ttl", "grace", "nice", "processes", "quotas", "rate_limit", "retries",
        "store_queue", "store_threads", "threads",
    }
)  # fmt: skip
"""Options that apply to a store only: a tier that moves its rows by itself has no tier host and none of these."""
EACH_OTHER_TENANT = "*"
"""In ``quotas``, in place of a tenant's name: each tenant without a quota of its own."""
_MOST_PROCESSORS = 65_536  # more than any kernel numbers
_TierConfig = TypeVar("_TierConfig", bound="TierConfig")

Compression: TypeAlias = Literal["none", "read", "zstd"]
"""How a tier's values are compressed on their way to its store, without loss."""

Admission: TypeAlias = Literal["all", "second_access", "on_eviction", "expected-reuse"]
"""Which chunks go down to a tier, and when."""


Quotas: TypeAlias = dict[str, Annotated[Size, Field(gt=0)]]
"""The most bytes of a tier's values by tenant, or by ``EACH_OTHER_TENANT``."""


def quota_of(quotas: Mapping[str, int], tenant: str) -> int | None:
    """Return a tenant's quota, or that of each other tenant; None if it has none, as what is of no tenant ("")."""
    return quotas.get(tenant, quotas.get(EACH_OTHER_TENANT)) if tenant else None


def expand_variables(text: str) -> str:
    """Replace each ``${NAME}`` by that environment variable's value; an unset one is a ValueError.

    Line breaks at its end are left out, as at the end of a secret's file: what wrote it there often appends one.
    """

    def value_of(match: re.Match[str]) -> str:
        name = match[1]
        if not match[2]:
            raise ValueError("'${' without its '}'")  # the text itself may be a secret
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{match[0]!r} does not name an environment variable")
        if name not in os.environ:
            raise ValueError(f"environment variable {name!r} is not set")
        return os.environ[name].rstrip("\r\n")

    return _VARIABLE.sub(value_of, text)


class Secret:
    """A password or key that remembers its source and never prints.

    Written as plain text, as ``${NAME}``, or as ``{file: PATH}``; a file's content (without the last line break)
    is read at every ``reveal``, so that a rotated secret is picked up.
    """

    def __init__(self, value: str = "", *, source: str = "config", file: str | None = None) -> None:
        self._value = value
        self.source = f"file {file}" if file else source
        self.file = file

    def reveal(self) -> str:
        """Return the secret itself. OSError if its file cannot be read."""
        return read_file(self.file).decode("utf-8").rstrip("\r\n") if self.file else self._value

    def __repr__(self) -> str:
        return f"Secret(from {self.source})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and (self._value, self.source) == (other._value, other.source)

    def __hash__(self) -> int:
        return hash((self._value, self.source))

    @classmethod
    def _validate(cls, value: object, info: ValidationInfo) -> "Secret":
        resolved = bool(info.context and info.context.get(RESOLVED))
        match value:
            case Secret():
                return value
            case {"file": str(path), **rest} if not rest:
                secret = cls(file=path if resolved else expand_variables(path))
                try:
                    secret.reveal()
                except (OSError, UnicodeDecodeError) as error:
                    raise ValueError(f"cannot read the secret's file: {error}") from None
                return secret
            case {"value": str(text), "source": str(source)} if resolved:
                return cls(text, source=source)
            case str(text):
                names = ", ".join(f"${{{name}}}" for name, _ in _VARIABLE.findall(text))
                return cls(expand_variables(text), source=names or "config")
        raise ValueError("expected a text (a number in quotes), '${NAME}' or {file: PATH}")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(
            cls._validate,
            serialization=core_schema.plain_serializer_function_ser_schema(cls._serialize, info_arg=True),
            json_schema_input_schema=core_schema.union_schema(
                [
                    core_schema.str_schema(),
                    core_schema.dict_schema(core_schema.str_schema(), core_schema.str_schema()),
                ]
            ),
        )

    @staticmethod
    def _serialize(secret: "Secret", info: SerializationInfo) -> object:
        if not (info.context and info.context.get(RESOLVED)):
            return repr(secret)
        if secret.file:
            return {"file": secret.file}
        return {"value": secret.reveal(), "source": secret.source}


def _types_in(annotation: Any) -> Iterator[Any]:
    """Yield the annotation and, if it is a union, a list and so on, all that is in it."""
    yield annotation
    for argument in get_args(annotation):
        yield from _types_in(argument)


def _expand_all(value: Any) -> Any:
    match value:
        case str():
            return expand_variables(value)
        case list():
            return [_expand_all(item) for item in value]
        case dict():
            return {key: _expand_all(item) for key, item in value.items()}
    return value


class StrictModel(BaseModel):
    """A config model that forbids unknown options, never changes, and reads ``${NAME}`` from the environment."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _expand(cls, value: object, info: ValidationInfo) -> object:
        if (info.context and info.context.get(RESOLVED)) or info.field_name is None:
            return value
        types = [*_types_in(cls.model_fields[info.field_name].annotation)]
        # Secrets and models inside read their own variables, once, and a secret remembers where it is from.
        if any(isinstance(part, type) and issubclass(part, Secret | BaseModel) for part in types):
            return value
        if isinstance(value, bool) and (int in types or float in types) and bool not in types:
            # YAML writes it as yes, no, on, off too, and pydantic would take it for the number 0 or 1.
            raise PydanticCustomError("number_type", "expected a number")
        try:
            return _expand_all(value)
        except RecursionError:
            raise ValueError("it contains itself, by an alias") from None


class BreakerConfig(StrictModel):
    """The circuit breaker's limits: when a tier is taken out of use for a while, and when it is tried again."""

    failures: int = Field(default=5, ge=1, description="failures in a row that open the breaker")
    error_rate: Share = Field(default=0.5, description="share of failed calls in the window that opens it")
    window: Duration = Field(default=30.0, gt=0, description="how far back the error rate looks")
    min_calls: int = Field(default=20, ge=1, description="calls in the window before the rate counts")
    delay: Duration = Field(default=1.0, gt=0, description="time until the first probe; doubles with each failed one")
    max_delay: Duration = Field(default=30.0, gt=0, description="longest time between probes")


class RateLimit(StrictModel):
    """The most that a tier is asked for in a second; an option that is not set is no limit."""

    bytes_per_second: Size | None = Field(default=None, gt=0, description="most bytes of values, read or written")
    requests_per_second: float | None = Field(default=None, gt=0, description="most calls of the store")


class TierConfig(StrictModel):
    """The options that every tier has. Subclass it and add the tier's own, flat, with defaults and descriptions.

    A ``SecondaryTierManager`` has no tier host and none of core's threads: options about those
    (``processes``, ``cpus``, ``nice``, ``threads``, ``store_threads``, ``grace``, ``retries``, ``store_queue``,
    ``rate_limit``, ``exists_ttl``, ``compression``, ``io: process``) are refused for it; an option that the subclass
    declares itself is the tier's own.
    """

    type: str = Field(description="the installed tier plugin's name")
    name: str = Field(default="", description="this tier's name in logs and metrics; default: its type")
    io: Literal["process", "thread"] = Field(
        default="process", description="where its I/O runs; process: a tier host of its own"
    )
    processes: int | Literal["auto"] = Field(
        default="auto", description="tier hosts that share the tier's work; auto: by the processors there are, up to 8"
    )
    cpus: tuple[Annotated[int, Field(ge=0, lt=_MOST_PROCESSORS)], ...] = Field(
        default=(), description="processors that the tier's hosts may use; default: all"
    )
    nice: int = Field(
        default=5, ge=0, le=19, description="how far the tier's host gives way to the engine; 0: not at all"
    )
    required: bool = Field(default=False, description="a tier that cannot be reached at start stops the engine")
    read_only: bool = Field(default=False, description="never write or delete", json_schema_extra=LIVE)
    threads: int = Field(
        default=4, ge=1, le=256, description="transfers at the same time, in each tier host", json_schema_extra=LIVE
    )
    store_threads: int | Literal["auto"] = Field(
        default="auto",
        description="of these, how many may write at the same time; auto: all but one, or, where a write takes this "
        "machine's processors, as many as leave half of those to the engine",
        json_schema_extra=LIVE,
    )
    deadline: Duration = Field(default=30.0, gt=0, description="longest time of a transfer until it counts as failed")
    grace: Duration = Field(
        default=5.0, ge=0, description="time that a failed transfer has to end before its host is killed"
    )
    retries: int = Field(default=2, ge=0, description="further attempts after a transient error, inside the deadline")
    store_queue: int | Literal["auto"] = Field(
        default="auto",
        description="with so many values waiting to be written further stores are dropped, each as a whole, and "
        "counted; auto: what it writes in 2 s, in an eighth of the primary's rows at most, and 1024 values or 256 MiB "
        "at least",
        json_schema_extra=LIVE,
    )
    compression: Compression = Field(
        default="none",
        description="zstd: values are compressed, without loss, in the tier's host, and read compressed or not; read: "
        "written as they are, and read both ways; needs kvtiers[compression]",
    )
    breaker: BreakerConfig = Field(default_factory=BreakerConfig, description="when the tier is taken out of use")
    rate_limit: RateLimit = Field(
        default_factory=RateLimit, description="the most that the tier may be asked for", json_schema_extra=LIVE
    )
    quotas: Quotas = Field(
        default_factory=dict,
        description="by tenant, the most bytes of its values here, whose oldest go first; '*': of each other tenant",
    )
    admission: Admission = Field(
        default="all",
        description="which chunks go down to this tier: all at once; second_access, when one is wanted again (fewest "
        "writes, but 14 to 23% fewer hits on chats); on_eviction; or expected-reuse, then, if likely to be used again",
    )
    may_lose: Share = Field(
        default=0.01, gt=0, le=1, description="most of all hits that 'admission: expected-reuse' may cost, about"
    )
    writes_per_hour: Size | None = Field(
        default=None, gt=0, description="most bytes an hour that 'admission: expected-reuse' writes; default: no bound"
    )
    encrypt: bool = Field(
        default=True,
        description="encrypt this tier's values, where the config has 'encryption'; false: they are stored in clear",
    )
    exists_ttl: Duration = Field(
        default=60.0, ge=0, description="how long the answer of an existence check is reused", json_schema_extra=LIVE
    )

    @property
    def tier_name(self) -> str:
        """The tier's name: ``name``, or its type."""
        return self.name or self.type

    @property
    def place(self) -> str:
        """Which store this is, among those of the tier's type: a path, or a server and a prefix; "": it is not known.

        Two tiers of one config that store in the same place are refused: each value would be written and looked up
        twice. No secret, since it is shown, and found without asking anybody: not for a host's other names, for
        example.
        """
        return ""

    @property
    def shared_limits(self) -> dict[str, str]:
        """The limits that this tier sets on stored values, by option, in words; options that set none are left out.

        Engines that share a store should have the same. Each leaves its own there; one that opens the store says in
        one line if the last writer's differ. No secret, since they are stored and shown; one of more than 80 characters
        as its digest.
        """
        quotas = ", ".join(f"{tenant}: {format_size(nbytes)}" for tenant, nbytes in sorted(self.quotas.items()))
        return {"quotas": f"{{{quotas}}}"} if quotas else {}

    @field_validator("processes")
    @classmethod
    def _is_a_number_of_processes(cls, processes: int | str) -> int | str:
        if isinstance(processes, int) and not 1 <= processes <= _MOST_PROCESSES:
            raise ValueError(f"expected 1 to {_MOST_PROCESSES} or 'auto', got {processes}")
        return processes

    @field_validator("quotas")
    @classmethod
    def _are_of_tenants(cls, quotas: dict[str, int]) -> dict[str, int]:
        for tenant in quotas:
            if tenant != EACH_OTHER_TENANT and (not TENANT.fullmatch(tenant) or ".." in tenant):
                raise ValueError(
                    f"tenant {tenant[:80]!r} cannot be used; expected 1 to 64 of a-z 0-9 . _ -, first a letter or "
                    f"digit, no '..', or {EACH_OTHER_TENANT!r} for each other tenant"
                )
        return quotas

    @model_validator(mode="after")
    def _counts_in_one_host(self) -> "TierConfig":
        if self.quotas and self.processes not in {"auto", 1}:
            raise ValueError("'quotas' are counted in one tier host; leave out 'processes'")
        return self

    @model_validator(mode="after")
    def _leaves_a_thread_for_loads(self) -> "TierConfig":
        most = max(1, self.threads - 1)
        if self.store_threads != "auto" and not 1 <= self.store_threads <= most:
            raise ValueError(
                f"'store_threads: {self.store_threads}' beside 'threads: {self.threads}': expected 1 to {most} or "
                "'auto', since one thread at least is kept for loads"
            )
        return self

    @field_validator("store_queue")
    @classmethod
    def _takes_a_value(cls, store_queue: int | Literal["auto"]) -> int | Literal["auto"]:
        if store_queue != "auto" and store_queue < 1:
            raise ValueError(f"expected at least 1, or 'auto', got {store_queue}")
        return store_queue

    @field_validator("compression")
    @classmethod
    def _has_its_library(cls, compression: Compression) -> Compression:
        if compression != "none" and find_spec("zstandard") is None:
            raise ValueError(
                f"'compression: {compression}' needs the package zstandard, which is not installed: pip install "
                "'kvtiers[compression]', or leave the option out"
            )
        return compression

    @model_validator(mode="after")
    def _expects_reuse(self) -> "TierConfig":
        defaults = {name: TierConfig.model_fields[name].default for name in ("may_lose", "writes_per_hour")}
        given = [name for name, default in defaults.items() if getattr(self, name) != default]
        if given and self.admission != "expected-reuse":
            raise ValueError(f"'{given[0]}' is obeyed with 'admission: expected-reuse' only; leave it out")
        return self

    @model_validator(mode="after")
    def _may_have_several_hosts(self) -> "TierConfig":
        if self.processes not in {"auto", 1} and self.io == "thread":
            raise ValueError(f"'processes: {self.processes}' needs 'io: process'")
        return self


def dump_resolved(config: TierConfig) -> dict[str, Any]:
    """Return a validated config, its secrets in plain text, as JSON values for ``load_resolved`` in another process."""
    return config.model_dump(mode="json", context={RESOLVED: True})


def load_resolved(model: type[_TierConfig], data: dict[str, Any]) -> _TierConfig:
    """Rebuild a config of this model from ``dump_resolved``: no variable is read again, no unit is asked for."""
    return model.model_validate(data, context={RESOLVED: True})
