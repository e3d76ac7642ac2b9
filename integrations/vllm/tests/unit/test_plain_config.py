"""A section of vLLM's config is the same plain data in every process, and other data for other settings."""

import enum
import functools
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kvtiers_vllm.identity import digest, plain

_SECTION = """
import enum, sys
from types import SimpleNamespace
from kvtiers_vllm.identity import digest, plain

class Kind(enum.Enum):
    ONE = object()

class Opaque:
    __slots__ = ()
    def __str__(self):
        return "opaque"

class Bare:
    pass

class Slotted:
    __slots__ = ("kept",)
    def __init__(self):
        self.kept = {"b", "a"}

kinds = {Kind.ONE: {"b", "a", "c", "d"}}
nested = [Opaque(), Bare(), Slotted(), lambda: None, print, object()]
section = SimpleNamespace(kinds=kinds, types=(int, Kind), nested=nested, _private=object())
print(digest({"section": plain(section)}))
"""


def test_a_section_is_the_same_in_every_process():
    digests = {
        subprocess.run(
            [sys.executable, "-c", _SECTION], check=True, capture_output=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(digests) == 1


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class One:
    def __init__(self, bits=4):
        self.bits = bits


class Two(One):
    pass


class Slotted:
    __slots__ = ("bits",)

    def __init__(self, bits):
        self.bits = bits


class SlottedToo(Slotted):
    __slots__ = ()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (One(4), One(8)),
        (One(), Two()),
        (One, Two),
        (One(), vars(One())),
        (Slotted(4), Slotted(8)),
        (Slotted(4), SlottedToo(4)),
        (Colour.RED, Colour.BLUE),
        (plain, digest),
        (range(2), range(3)),
        ({1, 2}, {1, 3}),
        ({"bits": 4}, {"bits": 8}),
        ([1, [2]], [1, [3]]),
        (1, True),
        (None, "None"),
        (SimpleNamespace(of=functools.partial), SimpleNamespace(of=functools.reduce)),
    ],
)
def test_other_settings_are_other_data(one, other):
    assert digest({"": plain(one)}) != digest({"": plain(other)})


def test_what_is_private_is_left_out():
    kept = One()
    kept._cache = object()
    assert plain(kept) == plain(One())
