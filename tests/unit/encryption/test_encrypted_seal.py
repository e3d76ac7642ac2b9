"""The encrypted seal: every byte of it, and that nothing but the very value is accepted."""

import hashlib
import hmac
import json
import random
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.encryption.keyed import key

from kvtiers.encryption.keys import SealingKey
from kvtiers.encryption.seal import ENCRYPTED_SEAL_FORMAT, decrypt_value, encrypt_value, read_encrypted_seal
from kvtiers.layout.seal import SealVerdict, check_value, read_seal, seal_value

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "seal-2.json").read_text(encoding="utf-8"))
NAME = "test/model-0123456789abcdef01234567/k" + "0" * 88
LAYOUT_ID = bytes(range(8))
PAYLOAD = 4000
CLEAR = bytes(i * 7 % 256 for i in range(PAYLOAD))
KEY = key()


def encrypted(payload=CLEAR, length=4096, name=NAME, layout_id=LAYOUT_ID, with_key=KEY, nonce=b""):
    value = memoryview(bytearray(b"\xa5" * length))
    encrypt_value([memoryview(payload)], value, name, layout_id, with_key, nonce)
    return bytearray(value)


def decrypt(value, payload=PAYLOAD, name=NAME, layout_id=LAYOUT_ID, with_key=KEY):
    return decrypt_value(memoryview(value), payload, name, layout_id, with_key)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["title"])
def test_encrypted_seals_of_this_format_never_change(case):
    assert ENCRYPTED_SEAL_FORMAT == 2, "another format needs a golden file of its own, beside this"
    sealed_with = SealingKey(bytes.fromhex(case["master"]), case["name"].partition("/")[0])
    payload = bytes(i * 7 % 256 for i in range(case["payload_bytes"]))
    rest = case["name"], bytes.fromhex(case["layout_id"]), sealed_with
    value = encrypted(payload, case["value_bytes"], *rest, bytes.fromhex(case["nonce"]))
    assert value[-64:].hex() == case["seal"]
    assert hashlib.sha256(value).hexdigest() == case["sha256"]
    assert decrypt(value, len(payload), *rest) is SealVerdict.OK
    assert value[: len(payload)] == payload


def test_an_encrypted_seal_is_as_written_down():
    nonce, scope, master = bytes(12), "test", bytes([1]) * 31 + b"\0"
    derived = {
        what: HKDF(SHA256(), nbytes, b"kvtiers encryption 1", f"{what}\0{scope}".encode()).derive(master)
        for what, nbytes in (("id", 4), ("seal", 32))
    }
    header = b"kvtSEAL\n" + (2).to_bytes(4, "little") + (96).to_bytes(4, "little") + (4096).to_bytes(8, "little")
    header += LAYOUT_ID + derived["id"]
    of_value = hmac.digest(derived["seal"], NAME.encode(), "sha256")
    ciphertext = AESGCM(of_value).encrypt(nonce, CLEAR, header + NAME.encode())
    value = encrypted(nonce=nonce)
    assert value == ciphertext[:-16] + bytes(32) + header + nonce + ciphertext[-16:]
    assert read_encrypted_seal(memoryview(value)) == (PAYLOAD, LAYOUT_ID, derived["id"].hex())


@settings(deadline=None, max_examples=50)
@given(st.lists(st.binary(max_size=200), max_size=6), st.integers(0, 100))
def test_a_payload_comes_back_from_wherever_its_parts_lay(parts, gap):
    payload = b"".join(parts)
    value = memoryview(bytearray(len(payload) + gap + 64))
    encrypt_value([memoryview(part) for part in parts], value, NAME, LAYOUT_ID, KEY)
    assert decrypt_value(value, len(payload), NAME, LAYOUT_ID, KEY) is SealVerdict.OK
    assert bytes(value[: len(payload)]) == payload


def test_a_value_shows_nothing_of_its_payload_and_is_another_one_each_time():
    once, again = encrypted(bytes(PAYLOAD)), encrypted(bytes(PAYLOAD))
    assert once[:PAYLOAD] != again[:PAYLOAD], "equal payloads cannot be recognised"
    assert max(map(bytes(once[:PAYLOAD]).count, range(256))) < 60, "and look like random bytes"


def test_any_changed_bit_of_a_value_is_refused():
    value = encrypted()
    for bit in [*random.Random(1).sample(range(PAYLOAD * 8), 500), *range(PAYLOAD * 8, 4096 * 8)]:
        forged = bytearray(value)
        forged[bit // 8] ^= 1 << bit % 8
        assert decrypt(forged) is not SealVerdict.OK, bit


def test_a_value_under_another_name_of_another_layout_length_or_key_is_refused():
    assert decrypt(encrypted()) is SealVerdict.OK, "the control"
    assert decrypt(encrypted(name=NAME[:-1] + "1")) is SealVerdict.CORRUPT
    assert decrypt(encrypted(layout_id=b"another!")) is SealVerdict.FOREIGN
    assert decrypt(encrypted(CLEAR[:-1])) is SealVerdict.CORRUPT
    assert decrypt(encrypted(length=8192)[:4096]) is SealVerdict.CORRUPT
    assert decrypt(encrypted()[-64:].rjust(8192, b"\0")) is SealVerdict.CORRUPT
    assert decrypt(encrypted(with_key=key(2))) is SealVerdict.CORRUPT
    assert decrypt(encrypted(with_key=key(1, "other"))) is SealVerdict.CORRUPT, "one master key, another namespace"


def test_a_key_that_pretends_to_have_the_id_of_another_gets_nowhere():
    impostor = key(2)
    impostor.id = KEY.id
    assert decrypt(encrypted(with_key=impostor)) is SealVerdict.CORRUPT


def test_a_plain_value_is_foreign_here_and_an_encrypted_one_there():
    plain = bytearray(4096)
    seal_value(memoryview(plain), PAYLOAD, NAME, LAYOUT_ID)
    assert decrypt(plain) is SealVerdict.FOREIGN
    assert check_value(memoryview(encrypted()), PAYLOAD, NAME, LAYOUT_ID) is SealVerdict.FOREIGN
    assert read_encrypted_seal(memoryview(plain)) is None
    assert read_seal(memoryview(encrypted())) is None


@pytest.mark.parametrize("value", [b"", b"kvtSEAL\n", bytes(63), bytes(4096), b"\xff" * 4096])
def test_what_has_no_encrypted_seal_is_none(value):
    assert read_encrypted_seal(memoryview(value)) is None
    if len(value) > 64:
        assert decrypt(bytearray(value)) is SealVerdict.CORRUPT
