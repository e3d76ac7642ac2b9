import re
from pathlib import Path

from kvtiers import __version__
from kvtiers.api import API_VERSION
from kvtiers.control import CONTROL_FORMAT
from kvtiers.encryption.seal import ENCRYPTED_SEAL_FORMAT
from kvtiers.host.wire import PROTOCOL_FORMAT
from kvtiers.layout.cache_layout import FINGERPRINT_FORMAT
from kvtiers.layout.compressed_value import COMPRESSED_FORMAT
from kvtiers.layout.seal import SEAL_FORMAT
from kvtiers.layout.storage_name import KEYED_NAME_FORMAT, NAME_FORMAT
from kvtiers.region.handshake import HANDSHAKE_VERSION
from kvtiers.scheduler.block_hash import BLOCK_HASH_ALGORITHM
from kvtiers_fs.root import FORMAT as DIRECTORY_FORMAT
from kvtiers_fs.slab.format import SLAB_FORMAT
from kvtiers_vllm.stack.keys import REQUEST_KEY_FORMAT

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = {
    "storage name": NAME_FORMAT,
    "storage name of an encrypted value": KEYED_NAME_FORMAT,
    "seal": SEAL_FORMAT,
    "compressed value": COMPRESSED_FORMAT,
    "seal of an encrypted value": ENCRYPTED_SEAL_FORMAT,
    "fingerprint": FINGERPRINT_FORMAT,
    "block hash": int(BLOCK_HASH_ALGORITHM.rpartition("-")[2]),
    "keys of requests with an adapter or a salt, in vLLM": REQUEST_KEY_FORMAT,
    "handshake of the region": HANDSHAKE_VERSION,
    "host protocol": PROTOCOL_FORMAT,
    "commands to an engine": CONTROL_FORMAT,
    "directory of the `fs` tier": int(DIRECTORY_FORMAT.split()[1]),
    "slab of the `fs` tier": SLAB_FORMAT,
    "API for tiers": API_VERSION,
}


def test_the_newest_entry_is_of_this_version_and_states_the_numbers_of_the_formats():
    text = (ROOT / "CHANGELOG.md").read_text()
    version, entry = re.search(r"^## (\S+).*\n((?:(?!## ).*\n)*)", text, re.MULTILINE).groups()
    assert version == __version__
    stated = re.findall(r"^\| ([^|]+) \| (\d+) \|", entry, re.MULTILINE)
    assert {name: int(number) for name, number in stated} == NUMBERS
