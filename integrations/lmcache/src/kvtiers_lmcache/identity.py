"""What a value means, beside its key: all that LMCache's keys lack, from its objects, the options, the model's files.

An ``ObjectKey`` has a hash over tokens, a model's name, a rank, an object group and a salt. It has no shape, no type
and no weights: a server that is started again with another dtype, or with new weights under the same name, finds the
old values. Here they are a part of what is asked for: another kind is another fingerprint, and a miss. What decides the
bytes and cannot be established is refused, in one line.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from kvtiers import ModelIdentity
from kvtiers.api import ConfigError
from kvtiers.model_files import digest_of_file, digest_of_folder
from kvtiers_lmcache.options import Options

__all__ = ["ObjectKind", "identity_of", "kind_of", "name_of", "release"]

_PACKED = frozenset({"torch.uint8", "torch.int8"})  # what numbers these hold, LMCache does not say


class ObjectKind(NamedTuple):
    """What all values of a kind have alike. ``form``: the mode of LMCache, and what it decides.

    ``shapes``, ``dtypes``: of the tensors that lie one behind the other in an object; ``nbytes``: of all of them.
    """

    model: str
    form: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    nbytes: int


def kind_of(model: str, form: str, shapes: Iterable[Sequence[int]], dtypes: Iterable[Any]) -> ObjectKind:
    """Return the kind of objects with tensors of these shapes and torch types. ValueError if their numbers differ."""
    sizes, types = tuple(tuple(map(int, shape)) for shape in shapes), list(dtypes)
    nbytes = sum(prod(size) * int(kind.itemsize) for size, kind in zip(sizes, types, strict=True))
    return ObjectKind(model, form, sizes, tuple(map(str, types)), nbytes)


def name_of(key: Any) -> bytes:
    """Return an ``ObjectKey`` as the client's key: a hash over all of it but the model, which is in the identity."""
    salt = key.cache_salt.encode()
    rest = b"%d %d %d:" % (key.kv_rank, key.object_group_id, len(salt))
    return hashlib.sha256(rest + salt + key.chunk_hash).digest()


def identity_of(kind: ObjectKind, options: Options) -> ModelIdentity:
    """Return the identity of values of a kind. ConfigError, a line for each option to set, if it is not established.

    Reads the model's files where its name is a folder, and the options do not name its weights.
    """
    problems, weights = [], ""
    try:
        weights = _weights(kind.model, options.weights)
    except ConfigError as error:
        problems += error.problems
    if _PACKED.intersection(kind.dtypes) and not options.kv_dtype:
        problems.append(
            f"kvtiers: the KV of {kind.model!r} is packed in {', '.join(sorted(set(kind.dtypes)))}, which does not say "
            "of what; set 'kv_dtype', such as fp8_e4m3"
        )
    if problems:
        raise ConfigError(problems)
    layout = {"lmcache": release(), "form": kind.form, "shapes": kind.shapes, "dtypes": kind.dtypes}
    return ModelIdentity(
        kind.model,
        weights=weights,
        kv_dtype=f"{'+'.join(sorted(set(kind.dtypes)))} {options.kv_dtype}".strip(),
        kv_layout=f"{json.dumps(layout)} {options.kv_layout}".strip(),
        hash_algorithm="lmcache-chunk",
        hash_seed="",
        engine="lmcache",
    )


def release() -> str:
    """Return LMCache's version."""
    try:
        return version("lmcache")
    except PackageNotFoundError:
        return "unknown"


def _weights(model: str, given: str | dict[str, str]) -> str:
    """Return the identity of a model's weights. A hub's name has none: it does not say which revision runs."""
    named = given.get(model, "") if isinstance(given, dict) else given
    if named:
        return named
    path = Path(model)
    why = "its name is no folder on this machine"
    try:
        if path.is_dir():
            return digest_of_folder(path)
        if path.is_file():
            return digest_of_file(path)
    except (OSError, ValueError, KeyError) as error:
        why = str(error)
    raise ConfigError(
        f"kvtiers: the weights of {model!r} cannot be identified: {why}; set 'weights' to their commit or digest"
    )
