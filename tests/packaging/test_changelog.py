import re
from pathlib import Path

from kvtiers import __version__
from kvtiers.api import API_VERSION
from kvtiers.rows.handshake import HANDSHAKE_VERSION
from kvtiers.rows.layout import FINGERPRINT_FORMAT
from kvtiers.rows.names import NAME_FORMAT
from kvtiers.rows.seal import SEAL_FORMAT
from kvtiers.secondary.wire import PROTOCOL_FORMAT

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = {
    "storage name": NAME_FORMAT,
    "seal": SEAL_FORMAT,
    "fingerprint": FINGERPRINT_FORMAT,
    "handshake of the region": HANDSHAKE_VERSION,
    "host protocol": PROTOCOL_FORMAT,
    "API for tiers": API_VERSION,
}


def test_the_newest_entry_is_of_this_version_and_states_the_numbers_of_the_formats():
    text = (ROOT / "CHANGELOG.md").read_text()
    version, entry = re.search(r"^## (\S+).*\n((?:(?!## ).*\n)*)", text, re.MULTILINE).groups()
    assert version == __version__
    stated = re.findall(r"^\| ([^|]+) \| (\d+) \|", entry, re.MULTILINE)
    assert {name: int(number) for name, number in stated} == NUMBERS
