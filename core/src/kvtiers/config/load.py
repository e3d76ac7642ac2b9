"""The config loader: reports every problem at once, one line each."""

import errno
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import ValidationError

from kvtiers._failures import error_text
from kvtiers.api import ConfigError, TierConfig, TierPluginError
from kvtiers.api.config import HOST_OPTIONS, expand_variables
from kvtiers.api.files import read_file
from kvtiers.config.models import OffloadConfig
from kvtiers.config.problems import one_line, problems_in, shown
from kvtiers.config.yaml_text import parse_yaml
from kvtiers.encryption.config import EncryptionConfig
from kvtiers.encryption.key_source import check_sources
from kvtiers.layout.storage_name import check_tenant
from kvtiers.plugins import SHADOW_GROUP, did_you_mean, installed_tiers, load_class, load_tier

__all__ = ["load_config", "read_config"]

_TIER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_RESERVED_TIER_NAMES = {"primary", "gpu"}  # in reports of hits and bytes: the CPU tier, the engine's own cache

PathOrMapping: TypeAlias = str | os.PathLike[str] | Mapping[str, Any]


def load_config(source: PathOrMapping) -> OffloadConfig:
    """Return the config in this YAML file, or in this mapping, with every tier checked by its own plugin.

    ConfigError with one line for each problem; a line begins with the file's name as given, or with ``config``.
    Imports the plugins of the tiers that are named, and no client library. Opens nothing.
    """
    where = "config" if isinstance(source, Mapping) else os.fspath(source)
    try:
        document = source if isinstance(source, Mapping) else _read(where)
        config = _validate(document)
    except ConfigError as error:
        raise ConfigError([one_line(f"{where}: {problem}") for problem in error.problems]) from None
    if not isinstance(source, Mapping):
        config._source = str(Path(where).absolute())  # noqa: SLF001 -- no option of the file's
    return config


def _read(path: str) -> Mapping[Any, Any]:
    document = parse_yaml(read_config(path))
    if document is None:
        raise ConfigError("the file is empty; expected at least 'version: 1' and 'primary'")
    if not isinstance(document, Mapping):
        # Not what it is: the file may be another one than was meant, such as a key's.
        raise ConfigError(f"expected a mapping of options, got {'a list' if isinstance(document, list) else 'a text'}")
    return document


def read_config(path: str | os.PathLike[str]) -> bytes:
    """Return what a config's file has, unread; ConfigError, not naming the file, if it cannot be one."""
    try:
        return read_file(path)
    except IsADirectoryError:
        raise ConfigError("this is a directory; expected a YAML file") from None
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            raise ConfigError("the file is larger than 1 MiB, so it is hardly a config") from None
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read the file: {reason}") from None


def _validate(document: Mapping[Any, Any]) -> OffloadConfig:
    tiers, tier_problems = _tiers(document.get("secondary"))
    # Tiers that are wrong are reported by themselves; the rest is checked all the same.
    document = {**document, "secondary": tuple(tiers)}
    try:
        config = OffloadConfig.model_validate(document)
    except ValidationError as error:
        raise ConfigError([*problems_in(error, OffloadConfig, document), *tier_problems]) from None
    problems = [*_policy_problems(config), *_encryption_problems(config), *tier_problems]
    problems += _place_problems(config)
    if config.tenants is not None:
        problems += config.tenants.problems(config.namespace)
    else:
        problems += [
            f"secondary[{index}] ({tier.type}): quotas: the config has no 'tenants'; add 'tenants: {{}}'"
            for index, tier in enumerate(tiers)
            if tier.quotas and not tier_problems
        ]
    if problems:
        raise ConfigError(problems)
    return config


def _policy_problems(config: OffloadConfig) -> list[str]:
    """Return a line for each policy that the config names and that cannot be used."""
    # Imported late: they load numpy, and nothing else here needs it.
    from kvtiers.primary.eviction import policy_class
    from kvtiers.tiering.admission import admission_class

    wanted: list[tuple[str, Callable[[], object]]] = [
        ("primary.eviction", partial(policy_class, config.primary.eviction)),
        *(
            (f"{where}: admission", partial(admission_class, tier.admission))
            for where, tier in _placed(config.secondary)
            if tier.admission == "expected-reuse"
        ),
    ]
    if config.what_if:
        wanted.append(("what_if", partial(load_class, SHADOW_GROUP, "what-if", "shadow cache")))
    problems = []
    for option, load in wanted:
        try:
            load()
        except ConfigError as error:
            problems += [f"{option}: {problem}" for problem in error.problems]
        except TierPluginError as error:
            problems.append(f"{option}: {error}")
    return problems


def _place_problems(config: OffloadConfig) -> list[str]:
    """Return a line for each tier whose store another one before it has already."""
    problems, first = [], dict[tuple[str, str], TierConfig]()
    for where, tier in _placed(config.secondary):
        if tier.place and (same := first.setdefault((tier.type, tier.place), tier)) is not tier:
            problems.append(
                f"{where}: {tier.tier_name!r} is the same store as {same.tier_name!r} ({tier.place}): each value would "
                "be written and looked up twice; leave one of them out"
            )
    return problems


def _encryption_problems(config: OffloadConfig) -> list[str]:
    """Return what stands in the way of encryption: nothing is stored in clear that was to be encrypted."""
    if config.encryption is None:
        return [
            f"{where}: encrypt: there is no key to encrypt with; add 'encryption' to the config, or leave it out"
            for where, tier in _placed(config.secondary)
            if "encrypt" in tier.model_fields_set and tier.encrypt
        ]
    problems = [
        f"{where}: values cannot be encrypted here, since a tier of this type moves them by itself; write "
        "'encrypt: false' to store them in clear, or leave 'encryption' out"
        for where, tier in _placed(config.secondary)
        if tier.encrypt and load_tier(tier.type).kind == "manager"
    ]
    problems += [
        f"{where}: compression: encrypted values are not compressed: their length would show what is in them; leave "
        "'compression' out, or write 'encrypt: false' to store them in clear"
        for where, tier in _placed(config.secondary)
        if tier.encrypt and tier.compression != "none"
    ]
    return [*problems, *_tenant_key_problems(config.encryption, config), *check_sources(config.encryption)]


def _tenant_key_problems(encryption: EncryptionConfig, config: OffloadConfig) -> list[str]:
    """Return a line for each tenant with a key of its own that no request can have."""
    tenants = config.tenants
    if encryption.tenants and tenants is None:
        return ["encryption.tenants: the config has no 'tenants'; add 'tenants: {}'"]
    problems = []
    for name in encryption.listed:
        try:
            check_tenant(name, config.namespace)
        except ConfigError as error:
            problems.append(f"encryption.tenants: {error}")
            continue
        if tenants is not None and not tenants.unknown and name not in tenants.named:
            problems.append(
                f"encryption.tenants.{name}: this tenant is not among 'tenants.named', and 'unknown: false' allows no "
                "other; add it there, or leave it out here"
            )
    return problems


def _placed(tiers: Sequence[TierConfig]) -> Iterator[tuple[str, TierConfig]]:
    for index, tier in enumerate(tiers):
        yield f"secondary[{index}] ({tier.type})", tier


def _tiers(entries: Any) -> tuple[list[TierConfig], list[str]]:
    if entries is None:
        return [], []
    if not isinstance(entries, list | tuple):
        return [], [f"secondary: expected a list of tiers ('- type: ...'), got {shown(entries)}"]
    tiers, problems, places = [], [], dict[str, str]()
    for index, entry in enumerate(entries):
        where = f"secondary[{index}]"
        try:
            tier = _tier(entry)
        except ConfigError as error:
            problems += [f"{where}{_label(entry)}: {problem}" for problem in error.problems]
            continue
        tiers.append(tier)
        if problem := _name_problem(tier.tier_name, places.setdefault(tier.tier_name, where), where):
            problems.append(f"{where} ({tier.type}): {problem}")
    return tiers, problems


def _name_problem(name: str, first: str, where: str) -> str:
    """Tier names stand in logs, metric labels and reports: each tier needs one of its own."""
    if not _TIER_NAME.fullmatch(name):
        return f"name: {shown(name)} cannot be used; expected 1 to 63 of A-Z a-z 0-9 . _ -, first a letter or digit"
    if name in _RESERVED_TIER_NAMES:
        return f"name: {name!r} stands for the engine's own memory in every report; choose another"
    return f"the name {name!r} is already that of {first}; give one of them another 'name'" if first != where else ""


def _label(entry: Any) -> str:
    """Return `` (type)`` for an entry whose type is installed: one that is not is the problem itself."""
    type_name = str(entry.get("type")) if isinstance(entry, Mapping) else ""
    return f" ({type_name})" if type_name in {installed.name for installed in installed_tiers()} else ""


def _tier(entry: Any) -> TierConfig:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"expected a mapping of options ('type: ...'), got {shown(entry)}")
    type_name = _type_name(entry)
    try:
        plugin = load_tier(type_name)
    except TierPluginError as error:
        raise ConfigError(str(error)) from None
    try:
        tier = plugin.config.model_validate(dict(entry))
    except ValidationError as error:
        raise ConfigError(problems_in(error, plugin.config, entry)) from None
    except Exception as error:
        raise ConfigError(f"its options cannot be checked, by the plugin's fault: {error_text(error)}") from error
    if not plugin.shareable and tier.processes not in {"auto", 1} and plugin.kind == "store":
        raise ConfigError(
            f"'processes: {tier.processes}': a store of this type belongs to one tier host; leave the option out"
        )
    if plugin.kind == "manager" and (names := _without_effect(tier)):
        raise ConfigError(
            f"{', '.join(names)}: no effect here: a tier of this type moves its values by itself, in the engine's "
            f"process; leave {'them' if len(names) > 1 else 'it'} out"
        )
    return tier


def _without_effect(tier: TierConfig) -> list[str]:
    """Return those of the options that were set which core obeys for stores alone, unless the type has its own."""
    model = type(tier)
    own = {name for part in model.__mro__[: model.__mro__.index(TierConfig)] for name in inspect.get_annotations(part)}
    names = sorted((tier.model_fields_set & HOST_OPTIONS) - own)
    return [*names, "io: process"] if "io" in tier.model_fields_set and tier.io == "process" else names


def _type_name(entry: Mapping[Any, Any]) -> str:
    if "type" not in entry:
        for key in entry:
            if isinstance(key, str) and did_you_mean(key, ["type"]):
                raise ConfigError(f"unknown option {shown(key)}. Did you mean 'type'?")
        known = ", ".join(sorted({installed.name for installed in installed_tiers()})) or "none"
        raise ConfigError(f"'type' is missing; expected an installed tier type ({known})")
    try:
        type_name = entry["type"]
        if isinstance(type_name, str) and type_name:
            return expand_variables(type_name)
    except ValueError as error:
        raise ConfigError(f"type: {error}") from None
    raise ConfigError(f"type: expected a text, got {shown(type_name)}")
