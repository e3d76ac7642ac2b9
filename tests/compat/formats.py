"""The forms of a stored value (plain, of a tenant, compressed, encrypted) and the format numbers of this release.

The golden stores of a form have its numbers in their file name (``stem``). So when a number rises, a test misses the
stores with the new one (``test_each_form_of_this_release_has_its_stores``), and the old ones stay.
"""

from kvtiers.encryption.seal import ENCRYPTED_SEAL_FORMAT, ENCRYPTED_SEAL_FORMATS
from kvtiers.layout.compressed_value import COMPRESSED_FORMAT, COMPRESSED_FORMATS
from kvtiers.layout.seal import SEAL_FORMAT, SEAL_FORMATS
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
PLAYED = {
    "seal": ("layout/seal.py", "SEAL_FORMATS", SEAL_FORMATS, NEXT_SEAL),
    "compressed": ("layout/compressed_value.py", "COMPRESSED_FORMATS", COMPRESSED_FORMATS, COMPRESSED_FORMAT + 1),
    "encrypted": ("encryption/seal.py", "ENCRYPTED_SEAL_FORMATS", ENCRYPTED_SEAL_FORMATS, NEXT_SEAL),
}
"""How the next number of each format is played: module, name and value of the numbers there, and the next one."""
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
