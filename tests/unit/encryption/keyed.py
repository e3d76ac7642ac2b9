"""Keys and names for the tests of encryption."""

import os

from kvtiers.encryption.keyed_names import KeyedNames
from kvtiers.encryption.keys import KeyRing, SealingKey
from kvtiers.layout.storage_name import StorageNames

NAMES = StorageNames("test/model-0123456789abcdef01234567/", bytes.fromhex("0123456789abcdef"))


def key(number=1, scope="test"):
    return SealingKey(bytes([number]) * 31 + b"\0", scope)


def ring(current=1, previous=None):
    return KeyRing(key(current), None if previous is None else key(previous))


def names(number=1):
    return KeyedNames.of(NAMES, key(number))


def random_key():
    return os.urandom(32) + bytes(4)
