"""The mapping of storage names to paths below the root, and back.

::

    {namespace}/{model}-{fingerprint}/{key}   ->   {namespace}/{model}-{fingerprint}/@3f/{key}

The parts of a name before its last one are directories (the *head*); in each, 256 shards ``@00`` to ``@ff`` hold the
files, by a checksum of the last part. What is not plain (``a-z 0-9 . _ -``, no first ``.``) is written as ``%2e``, so
that no name leads out of the root and none is that of our own files, which begin with ``.``. Parts longer than a file
name may be are cut into pieces, all but the last of them directories: ``aaa+/+bbb+/+ccc``.
"""

import re
from functools import lru_cache
from typing import NamedTuple
from zlib import crc32

__all__ = [
    "LONGEST_NAME",
    "SHARDS",
    "Place",
    "is_piece_folder",
    "name_part",
    "place_of",
    "shard_folder",
    "shard_number",
]

SHARDS = 256
_PIECE = 200  # file systems end at 255 bytes a part, some that encrypt names at 143 and more
LONGEST_NAME = 512
_PLAIN = re.compile(r"[a-z0-9_-][a-z0-9._-]*")
_ESCAPED = re.compile(r"%([0-9a-f]{2})")
_SHARD = re.compile(r"@([0-9a-f]{2})")


class Place(NamedTuple):
    """The folder (below the root, ends in the shard or a piece of the name), the file's name, the shard's number."""

    folder: str
    leaf: str
    shard: int


def _escape(part: str) -> str:
    if _PLAIN.fullmatch(part):
        return part
    if not part:
        raise ValueError("a storage name has no empty parts")
    text = [
        char if _PLAIN.fullmatch(char) or (char == "." and at) else "".join(f"%{byte:02x}" for byte in char.encode())
        for at, char in enumerate(part)
    ]
    return "".join(text)


def _pieces(part: str) -> list[str]:
    text = _escape(part)
    if len(text) <= _PIECE:
        return [text]
    pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
    return [f"{'+' if i else ''}{piece}{'+' if i < len(pieces) - 1 else ''}" for i, piece in enumerate(pieces)]


@lru_cache(maxsize=1024)
def _head_folder(head: str) -> str:
    return "".join(f"{piece}/" for part in head.split("/") for piece in _pieces(part))


def place_of(name: str) -> Place:
    """Return where the value of this name lies. ValueError if it is no storage name."""
    if len(name) > LONGEST_NAME:
        raise ValueError(f"a storage name has at most {LONGEST_NAME} characters, this one {len(name)}")
    head, slash, last = name.rpartition("/")
    *folders, leaf = _pieces(last)
    shard = crc32(last.encode()) % SHARDS
    folder = shard_folder(_head_folder(head) if slash else "", shard)
    return Place("/".join([folder, *folders]), leaf, shard)


def shard_folder(head: str, shard: int) -> str:
    """Return the folder of one shard of this head (empty, or ending in ``/``)."""
    return f"{head}@{shard:02x}"


def shard_number(folder_name: str) -> int | None:
    """Return the shard whose folder has this name, or None if it is not a shard's."""
    match = _SHARD.fullmatch(folder_name)
    return int(match[1], 16) if match else None


def is_piece_folder(folder_name: str) -> bool:
    """Return whether this is the folder of a piece of a name's part, which has a full piece of it."""
    return folder_name.endswith("+") and len(folder_name.strip("+")) == _PIECE


def name_part(pieces: str) -> str | None:
    """Return the part of a name whose pieces on disk, joined, are these; None: no name of ours has them."""
    text = pieces.replace("++", "")
    try:
        part = _ESCAPED.sub(lambda match: chr(int(match[1], 16)), text).encode("latin-1").decode()
        return part if "".join(_pieces(part)) == pieces else None
    except (UnicodeError, ValueError):
        return None
