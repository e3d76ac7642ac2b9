"""The cache layout: groups, tensors, cells and sizes of a row of the primary region, and the fingerprint over them.

A row is one chunk. Its value starts at byte 0, whatever the chunk's group; cell offsets are computed per group::

    direct      | rank 0: t0 t1 ... | rank 1: t0 t1 ... | ... | zeros | seal |      value_bytes(g)
    replicated  | rank 0: t0 t1 ... | zeros | seal |
    canonical   | canonical t0 | canonical t1 | ... | zeros | seal |

where each ``t`` is ``blocks_per_chunk`` pages of one KV tensor of group g, one block after the other.
"""

import dataclasses
import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

from kvtiers.api import ConfigError

__all__ = [
    "FINGERPRINT_FORMAT",
    "CacheLayout",
    "KVGroup",
    "KVTensor",
    "ModelIdentity",
    "RowLayout",
]

FINGERPRINT_FORMAT = 1
SEAL_BYTES = 64
_MOST_RANKS = 65_536
VALUE_ALIGN = 4096  # never the OS page: values must be the same on every machine

RowLayout = Literal["direct", "replicated", "canonical"]


@dataclass(frozen=True)
class ModelIdentity:
    """Everything besides the layout that decides what KV bytes mean. All of it enters the fingerprint.

    ``weights``: a resolved revision or a digest of the weights; empty: unknown, so nothing is shared. ``kv_layout``:
    the attention backend's order of a page. ``hash_*``: how the engine chains its block hashes. ``engine``: the code
    that lays the bytes out, such as "sglang"; engines of different names share nothing, whatever else is equal.
    """

    name: str
    weights: str = ""
    kv_dtype: str = ""
    kv_scales: str = ""
    rope: str = ""
    quantization: str = ""
    kv_layout: str = ""
    hash_algorithm: str = "sha256"
    hash_seed: str = "0"
    hash_bytes: int = 32
    engine: str = ""

    def facts(self) -> dict[str, Any]:
        """Return what enters the fingerprint: all fields, and ``engine`` where it is not empty."""
        facts = dataclasses.asdict(self)
        if not self.engine:
            del facts["engine"]
        return facts


@dataclass(frozen=True)
class KVGroup:
    """Layers whose KV cache is addressed by the same block table. ``window`` in tokens, for sliding windows only."""

    name: str
    tokens_per_block: int
    kind: Literal["full_attention", "sliding_window", "state_space"] = "full_attention"
    window: int | None = None


@dataclass(frozen=True)
class KVTensor:
    """One KV tensor (usually one layer): its group and the bytes of one block in it, padding left out.

    ``page_bytes``: one number, or one for each rank where they differ (0: the rank does not hold this tensor, as under
    pipeline parallelism). ``canonical_page_bytes``: the page's size independent of tensor parallelism.
    """

    name: str
    group: int
    page_bytes: int | tuple[int, ...]
    canonical_page_bytes: int = 0

    def page_on(self, rank: int) -> int:
        """Bytes of one block of this tensor on this rank."""
        return self.page_bytes if isinstance(self.page_bytes, int) else self.page_bytes[rank]


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


@dataclass(frozen=True)
class CacheLayout:
    """The shape of the whole KV cache, the same for the scheduler and all ranks. ConfigError if it is inconsistent."""

    model: ModelIdentity
    groups: tuple[KVGroup, ...]
    tensors: tuple[KVTensor, ...]
    blocks_per_chunk: int = 1
    world_size: int = 1
    row_layout: RowLayout = "direct"
    _payloads: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check()
        object.__setattr__(self, "_payloads", tuple(self._payload(g) for g in range(len(self.groups))))

    def _check(self) -> None:
        problems = []
        if self.row_layout not in get_args(RowLayout):
            problems.append(f"row_layout is {self.row_layout!r}, expected one of {', '.join(get_args(RowLayout))}")
        if not self.groups:
            problems.append("no KV group")
        if not 1 <= self.blocks_per_chunk <= 64:
            problems.append(f"blocks_per_chunk is {self.blocks_per_chunk}, expected 1 to 64")
        if not 1 <= self.world_size <= _MOST_RANKS:
            problems.append(f"world_size is {self.world_size}, expected 1 to {_MOST_RANKS}")
        for index, group in enumerate(self.groups):
            problems += [f"group {group.name!r}{text}" for text in self._group_problems(index, group)]
        for tensor in self.tensors:
            problems += [f"tensor {tensor.name!r}: {text}" for text in self._tensor_problems(tensor)]
        names = Counter(tensor.name for tensor in self.tensors)
        problems += [f"tensor {name!r} is there {count} times" for name, count in names.items() if count > 1]
        if problems:
            raise ConfigError([f"cache layout: {problem}" for problem in problems])

    def _group_problems(self, index: int, group: KVGroup) -> list[str]:
        problems = []
        if group.tokens_per_block < 1:
            problems.append(f": tokens_per_block is {group.tokens_per_block}, expected at least 1")
        windowed = group.kind == "sliding_window"
        if windowed != (group.window is not None and group.window >= 1):
            expected = "a number of tokens" if windowed else f"none, since its kind is {group.kind}"
            problems.append(f": window is {group.window}, expected {expected}")
        if not any(tensor.group == index for tensor in self.tensors):
            problems.append(" has no tensor")
        return problems

    def _tensor_problems(self, tensor: KVTensor) -> list[str]:
        problems = []
        if not 0 <= tensor.group < len(self.groups):
            problems.append(f"group {tensor.group} does not exist, expected 0 to {len(self.groups) - 1}")
        pages = tensor.page_bytes
        if isinstance(pages, tuple) and len(pages) != self.world_size:
            problems.append(f"page_bytes has {len(pages)} entries, expected one for each of {self.world_size} ranks")
        elif min(sizes := pages if isinstance(pages, tuple) else (pages,)) < 0 or max(sizes) < 1:
            problems.append(f"page_bytes is {pages}, expected a positive number of bytes")
        if self.row_layout == "replicated" and isinstance(pages, tuple) and len(set(pages)) > 1:
            problems.append(f"page_bytes {pages} differ, but in a replicated row all ranks hold the same bytes")
        if self.row_layout == "canonical" and tensor.canonical_page_bytes < 1:
            problems.append("canonical_page_bytes is missing, and a canonical row needs it")
        return problems

    def _payload(self, group: int) -> int:
        if self.row_layout == "direct":
            return sum(self.cell_bytes(group, rank) for rank in range(self.world_size))
        return self.cell_bytes(group, 0)

    def page_in_row(self, tensor: int, rank: int) -> int:
        """Bytes that one block of this tensor takes in a row's cell of this rank."""
        spec = self.tensors[tensor]
        return spec.canonical_page_bytes if self.row_layout == "canonical" else spec.page_on(rank)

    def cell_bytes(self, group: int, rank: int) -> int:
        """Bytes of one rank's cell in a chunk of this group; in a canonical row: of all its canonical pages."""
        return self.blocks_per_chunk * sum(
            self.page_in_row(index, rank) for index, tensor in enumerate(self.tensors) if tensor.group == group
        )

    def cell_offset(self, group: int, rank: int) -> int:
        """Return where this rank's cell starts in a chunk of this group, in bytes from the start of the row."""
        if self.row_layout != "direct":
            return 0
        return sum(self.cell_bytes(group, earlier) for earlier in range(rank))

    def tensor_offset(self, tensor: int, rank: int) -> int:
        """Return where this tensor's first block starts in a chunk of its group, in bytes from the start of the row.

        Block j of the chunk lies ``j * page_in_row(tensor, rank)`` bytes further.
        """
        group = self.tensors[tensor].group
        before = sum(self.page_in_row(i, rank) for i in range(tensor) if self.tensors[i].group == group)
        return self.cell_offset(group, rank) + before * self.blocks_per_chunk

    def payload_bytes(self, group: int) -> int:
        """Bytes of KV in a value of this group, without the zeros and the seal."""
        return self._payloads[group]

    def value_bytes(self, group: int) -> int:
        """Length of a value of this group: payload, zeros and the 64-byte seal, rounded up to 4096."""
        return _round_up(self._payloads[group] + SEAL_BYTES, VALUE_ALIGN)

    @cached_property
    def row_stride(self) -> int:
        """Bytes from one row of the region to the next: the largest value."""
        return max(self.value_bytes(group) for group in range(len(self.groups)))

    def tokens_per_chunk(self, group: int) -> int:
        """Tokens that one chunk of this group covers."""
        return self.groups[group].tokens_per_block * self.blocks_per_chunk

    @property
    def prefix_group(self) -> int:
        """The first group of full attention, whose chunks are a prompt's from its start; 0 if there is none."""
        return next((index for index, group in enumerate(self.groups) if group.kind == "full_attention"), 0)

    @property
    def windows(self) -> tuple[int, ...]:
        """By group, how many chunks a load of it needs before its end, as a window or a state; 0: all of the prefix."""
        return tuple(
            0 if group.kind == "full_attention" else -(-(group.window or 1) // self.tokens_per_chunk(index))
            for index, group in enumerate(self.groups)
        )

    def fingerprint_json(self) -> str:
        """Return the canonical JSON whose sha256 is the fingerprint: everything that decides what stored bytes mean."""
        direct = self.row_layout == "direct"
        document = {
            "format": FINGERPRINT_FORMAT,
            "model": self.model.facts(),
            "row_layout": self.row_layout,
            "blocks_per_chunk": self.blocks_per_chunk,
            "groups": [
                {
                    "kind": group.kind,
                    "window": group.window,
                    "tokens_per_block": group.tokens_per_block,
                    "payload_bytes": self.payload_bytes(index),
                    "value_bytes": self.value_bytes(index),
                }
                for index, group in enumerate(self.groups)
            ],
            "tensors": [
                {
                    "name": tensor.name,
                    "group": tensor.group,
                    "page_bytes": [self.page_in_row(index, rank) for rank in range(self.world_size if direct else 1)],
                }
                for index, tensor in enumerate(self.tensors)
            ],
        } | ({"world_size": self.world_size} if direct else {})
        return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of ``fingerprint_json``, as 64 hex digits."""
        return hashlib.sha256(self.fingerprint_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Return the layout as JSON, for a peer to compare or rebuild."""
        return json.dumps(self._as_dict(), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "CacheLayout":
        """Rebuild a layout from ``to_json``."""
        data: dict[str, Any] = json.loads(text)
        tensors = [
            KVTensor(**(t | {"page_bytes": tuple(p) if isinstance(p := t["page_bytes"], list) else p}))
            for t in data.pop("tensors")
        ]
        return cls(
            model=ModelIdentity(**data.pop("model")),
            groups=tuple(KVGroup(**group) for group in data.pop("groups")),
            tensors=tuple(tensors),
            **data,
        )

    def _as_dict(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        del data["_payloads"]
        return data

    def differences(self, other: "CacheLayout") -> list[str]:
        """Name the fields in which ``other`` differs from this layout, with both values; empty if they are equal.

        One page size for all ranks is equal to the same size written once for each rank.
        """
        return self.differences_in(json.loads(other.to_json()))

    def differences_in(self, document: Any) -> list[str]:
        """Return the ``differences`` to a layout as JSON has it, whatever is in there: no layout is made of it.

        To make a layout of a document with a wrong number of ranks could take minutes.
        """
        mine: dict[str, Any] = json.loads(self.to_json())
        return _differences("", self._one_page_a_tensor(mine), self._one_page_a_tensor(document))

    def _one_page_a_tensor(self, document: Any) -> Any:
        """Return the document with one page size in the place of the same size for each rank."""
        tensors = document.get("tensors") if isinstance(document, dict) else None
        for tensor in tensors if isinstance(tensors, list) else ():
            pages = tensor.get("page_bytes") if isinstance(tensor, dict) else None
            if isinstance(pages, list) and len(pages) == self.world_size and pages.count(pages[0]) == len(pages):
                tensor["page_bytes"] = pages[0]
        return document


def _differences(where: str, mine: Any, theirs: Any) -> list[str]:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        names = sorted(mine.keys() | theirs.keys())
        return [line for name in names for line in _differences(f"{where}.{name}", mine.get(name), theirs.get(name))]
    if isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        pairs = enumerate(zip(mine, theirs, strict=True))
        return [line for i, (a, b) in pairs for line in _differences(f"{where}[{i}]", a, b)]
    if isinstance(mine, list) and isinstance(theirs, list):
        return [f"{where.lstrip('.')}: {len(mine)} entries here, {len(theirs)} there"]
    return [] if mine == theirs else [f"{where.lstrip('.') or 'layout'}: {mine!r:.200} here, {theirs!r:.200} there"]
