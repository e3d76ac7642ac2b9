"""The forms in which this release stores values, the formats' numbers that each is made of, and how each is stored.

A form has its golden stores under the name of its numbers (``stem``), so a number that rises asks for new ones.
"""

from kvtiers.encryption.seal import ENCRYPTED_SEAL_FORMAT
from kvtiers.layout.compressed_value import COMPRESSED_FORMAT
from kvtiers.layout.seal import SEAL_FORMAT
from kvtiers.layout.storage_name import KEYED_NAME_FORMAT, NAME_FORMAT

FORMS = {
    "plain": (SEAL_FORMAT, NAME_FORMAT),
    "tenant": (SEAL_FORMAT, NAME_FORMAT),
    "compressed": (SEAL_FORMAT, NAME_FORMAT, COMPRESSED_FORMAT),
    "encrypted": (ENCRYPTED_SEAL_FORMAT, KEYED_NAME_FORMAT),
}
"""Numbers by form: the seal's first, then the name's."""
NEXT_SEAL = max(SEAL_FORMAT, ENCRYPTED_SEAL_FORMAT) + 1
"""The number that the next format of a seal gets, encrypted or not: they share one count."""
KEY = bytes(range(32))
"""The key of the encrypted stores, for ever."""


def stem(form):
    """Return the name of a form's stores, such as ``encrypted-2-2``."""
    return "-".join([form, *map(str, FORMS[form])])


def stored_as(form, folder):
    """Return what a form adds to a tier, to the config and to a client's arguments; writes the key into the folder."""
    if form == "compressed":
        return {"compression": "zstd"}, {}, {"length": 20_000}  # long enough to get shorter by a page
    if form == "encrypted":
        key = folder / "key"
        key.write_bytes(KEY)
        key.chmod(0o600)
        return {}, {"encryption": {"key": {"file": str(key)}}}, {}
    return ({}, {"tenants": {}}, {"tenant": "blue"}) if form == "tenant" else ({}, {}, {})
