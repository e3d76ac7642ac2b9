"""Options of the tier type ``fs``."""

import os
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field, field_validator

from kvtiers.api import Duration, Size, TierConfig

__all__ = ["FEWEST_SEGMENTS", "FORMAT_FILE", "FsConfig"]

FORMAT_FILE = ".kvtiers-fs"
"""The file in the directory that says what made it, and in which layout."""

FEWEST_SEGMENTS = 8
"""Segments of a slab at least, whatever the capacity."""

_MODES = {0o600: "0600", 0o640: "0640", 0o660: "0660"}


def _mode(value: object) -> object:
    # YAML reads a bare 0660 as an octal number.
    return _MODES.get(value, value) if type(value) is int else value


Mode: TypeAlias = Annotated[Literal["0600", "0640", "0660"], BeforeValidator(_mode)]


class FsConfig(TierConfig):
    """The options of an ``fs`` tier."""

    path: Path = Field(description="the directory, absolute; made if only its last part is missing")
    capacity: Size = Field(gt=0, description="most bytes of values; the least recently used are evicted first")
    layout: Literal["files", "slab"] = Field(
        default="files",
        description="files: a file a value, also on shared file systems; slab: large files, of a local disk alone",
    )
    max_age: Duration | None = Field(
        default=None, gt=0, description="a value that was not written or read for this long is deleted"
    )
    min_free: Size = Field(
        default=1 << 30,
        ge=0,
        description="free space kept for others: below it, values are evicted, none is written",
    )
    direct: Literal["cold"] | bool = Field(
        default="cold",
        description="bypass the page cache (O_DIRECT), where that works; cold: only for reads of values not in it",
    )
    fsync: bool = Field(default=False, description="wait at each write until the value would survive a power cut")
    mode: Mode = Field(default="0600", description="permissions of files; directories get theirs to match")
    group: str = Field(default="", description="group of all files, by name or number: its members may share them")

    @property
    def place(self) -> str:
        """The path."""
        return str(self.path)

    @field_validator("path")
    @classmethod
    def _is_absolute(cls, path: Path) -> Path:
        path = Path(os.path.expanduser(path))  # noqa: PTH111 -- Path's raises RuntimeError for a user without a home
        if not path.is_absolute() or ".." in path.parts:
            no_home = " ('~' is no folder here: the user has no home, and HOME is not set)" * str(path).startswith("~")
            raise ValueError(f"expected an absolute path without '..'{no_home}")
        return path
