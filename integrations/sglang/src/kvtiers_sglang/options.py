"""The options of the backend: what stands in ``--hicache-storage-backend-extra-config`` beside SGLang's own keys."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from kvtiers import OffloadConfig, load_config
from kvtiers.api import ConfigError, Duration, Size, StrictModel

__all__ = ["VARIABLE", "Options", "extra_config", "options_of", "tiers_of"]

VARIABLE = "KVTIERS_CONFIG"
_SGLANGS = frozenset(
    {"backend_name", "module_path", "class_name", "interface_v1", "allocator", "file_storage_path"}  # the last: added
)
_WHERE = "--hicache-storage-backend-extra-config"


class Options(StrictModel):
    """The options, validated."""

    config: str | dict[str, Any] = Field(description="file of the tiers, or what would stand in it")
    weights: str = Field(default="", description="commit or digest of the model's weights; found out where it can be")
    draft_weights: str = Field(default="", description="the same of a draft model's weights")
    tenant: str = Field(default="", description="whose pages all of this server's are; '' for no one's")
    deadline: Duration = Field(default=5.0, gt=0, description="time in which a call of SGLang's ends, over all pools")
    bounce_bytes: Size = Field(
        default=128 << 20, gt=0, description="shared memory of each pool's client, for pages on their way"
    )


def extra_config(path: str) -> dict[str, Any]:
    """Return what SGLang is given to load the backend with this config.

    Its pools lie in a memfd then, of the same small shared pages as without (``shm``), so that tier hosts can map
    them; but where the environment says of which other memory they are to be.
    """
    return {
        "backend_name": "kvtiers",
        "module_path": "kvtiers_sglang",
        "class_name": "KvtiersHiCache",
        "interface_v1": 1,
        "config": str(Path(path).absolute()),
    } | ({} if _wants_other_memory() else {"allocator": "shm"})


def _wants_other_memory() -> bool:
    """Return whether SGLang makes its pools of memory that no file stands for, or with ROCm should; as it reads it."""
    threads = os.environ.get("SGLANG_HICACHE_HOST_PARALLEL_ALLOC_THREADS", "")
    return (
        bool(os.environ.get("SGLANG_HUGEPAGE_SIZE", "").strip())
        or (threads.strip().isdigit() and int(threads) > 0)
        or os.environ.get("HSA_USERPTR_FOR_PAGED_MEM") == "0"
    )


def options_of(extra: Mapping[str, Any] | None) -> Options:
    """Read the options; ConfigError, a line for each problem. The config's place may be in ``KVTIERS_CONFIG``."""
    given = dict(extra or {})
    own = {name: value for name, value in given.items() if name not in _SGLANGS}
    if "config" not in own and os.environ.get(VARIABLE):
        own["config"] = os.environ[VARIABLE]
    # SGLang would otherwise copy pages into tensors of its own, in another order of bytes.
    problems = [] if given.get("interface_v1") else [f"{_WHERE}: 'interface_v1' is not set; add \"interface_v1\": 1"]
    try:
        options = Options.model_validate(own)
    except ValidationError as error:
        for problem in error.errors():
            name = ".".join(map(str, problem["loc"][:1]))
            hint = f", or set {VARIABLE}" if name == "config" else ""
            problems.append(f"{_WHERE}: {name!r}: {problem['msg']}{hint}; it has {', '.join(Options.model_fields)}")
    if problems:
        raise ConfigError(problems)
    return options


def tiers_of(options: Options) -> OffloadConfig:
    """Return the config of the tiers; ConfigError if it is wrong, or does not allow the server's tenant."""
    config = load_config(options.config)
    try:
        config.tenant_rule().check(options.tenant)
    except ConfigError as error:
        raise ConfigError(f"{_WHERE}: 'tenant': {error}") from None
    return config
