"""Where keys come from: each mistake is one line, and no line has a byte of a key."""

import base64
import contextlib
import os
import select
import sys
import time
from pathlib import Path

import pytest

from kvtiers.api import ConfigError, TierConfig
from kvtiers.config import load_config
from kvtiers.encryption.config import EncryptionConfig, dump_sources, encryption_of, load_sources
from kvtiers.encryption.key_source import check_sources, open_file_warnings, open_keys, read_key

RAW = bytes(range(100, 132)).replace(b"d", b"\x80")
TEXT = base64.b64encode(RAW).decode()
MEMORY = {"type": "memory", "capacity": "16MiB"}


def config(encryption, *tiers):
    return {
        "version": 1,
        "primary": {"capacity": "1MiB"},
        "secondary": list(tiers or [MEMORY]),
        "encryption": encryption,
    }


def read(**source):
    return read_key(EncryptionConfig(key=source).key, "encryption.key", "prod")


def problem(**source):
    with pytest.raises(ConfigError) as raised:
        read(**source)
    [line] = raised.value.problems
    return line


@pytest.fixture
def file(tmp_path):
    def write(content):
        path = tmp_path / "kv.key"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        path.chmod(0o600)
        return str(path)

    return write


def test_a_key_is_read_from_a_file_a_variable_or_a_command(file, monkeypatch):
    monkeypatch.setenv("KV_KEY", TEXT)
    urlsafe = base64.urlsafe_b64encode(RAW)
    for content in (RAW, TEXT, f"{TEXT}\n", urlsafe):
        assert read(file=file(content)) == RAW
    assert read(env="KV_KEY") == RAW
    assert read(command=["printf", "%s", TEXT]) == RAW
    assert read(command=["sh", "-c", f'test "$KVTIERS_NAMESPACE" = prod && echo {TEXT}']) == RAW


def test_what_is_no_key_is_one_line_that_says_where_and_what_to_do(file, monkeypatch):
    monkeypatch.setenv("KV_KEY", "")
    assert "encryption.key.file: cannot read '/nowhere/kv.key': No such file" in problem(file="/nowhere/kv.key")
    assert problem(env="KV_NONE") == "encryption.key.env: environment variable 'KV_NONE' is not set"
    assert "variable KV_KEY has 0 bytes; expected 32 random bytes as base64" in problem(env="KV_KEY")
    assert "has 16 bytes; expected 32" in problem(file=file(base64.b64encode(bytes(range(16)))))
    assert "(5 bytes that are no base64)" in problem(file=file("hello"))
    assert "one byte, repeated" in problem(file=file(bytes(32)))
    assert "has 24 bytes" in problem(file=file("a password of 32 bytes as text!!".replace(" ", "x").replace("!", "x")))
    assert "failed with exit status 3: access denied ***" in problem(
        command=["sh", "-c", f"echo access denied {TEXT} >&2; echo {TEXT}; exit 3"]
    )
    assert "cannot be started: No such file" in problem(command=["/nowhere/kms"])


def test_a_command_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    pids = tmp_path / "pids"
    begin = time.monotonic()
    script = f"sleep 600 & echo $! > {pids}; wait"
    for timeout in ("500ms", "5s", "10s", "10s", "10s"):  # a busy machine may not have begun it by then
        assert "gave no key within" in problem(command=["sh", "-c", script], timeout=timeout)
        if pids.exists():
            break
    assert time.monotonic() - begin < 120
    child = int(pids.read_text())
    with contextlib.suppress(ProcessLookupError):  # it has ended, and been reaped
        descriptor = os.pidfd_open(child)
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        assert ended.poll(60_000), "what the command started runs on"
        os.close(descriptor)


def test_only_a_file_that_all_users_can_read_or_write_is_warned_of(file):
    path = file(TEXT)
    both = EncryptionConfig(key={"file": path}, previous={"env": "KV_KEY"})
    for mode, words in ((0o600, []), (0o440, []), (0o644, ["read"]), (0o602, ["write"])):
        Path(path).chmod(mode)
        lines = [*open_file_warnings(both)]
        assert len(lines) == len(words)
        assert all(f"can {word} {path} (mode {mode:04o}); chmod 600 it" in lines[0] for word in words)


def test_a_key_is_derived_for_each_namespace(file, monkeypatch):
    monkeypatch.setenv("KV_KEY", TEXT)
    both = EncryptionConfig(
        key={"file": file(TEXT)}, previous={"command": ["echo", base64.b64encode(RAW[::-1]).decode()]}
    )
    prod, test = open_keys(both, "prod"), open_keys(both, "test")
    assert prod.current.id != test.current.id
    assert prod.in_words() == f"key {prod.current.id}, and {prod.previous.id} is read"
    assert prod.find(prod.previous.id) is prod.previous
    assert prod.find("00000000") is None
    with pytest.raises(ConfigError, match="the same key; leave 'previous' out"):
        open_keys(EncryptionConfig(key={"env": "KV_KEY"}, previous={"env": "KV_KEY"}), "prod")


def test_a_config_with_encryption_is_checked_when_it_is_loaded(file, monkeypatch):
    monkeypatch.setenv("KV_KEY", TEXT)
    loaded = load_config(config({"key": {"file": file(TEXT)}}, MEMORY, {**MEMORY, "name": "clear", "encrypt": False}))
    here, clear = loaded.secondary
    assert encryption_of(here, loaded.encryption) is loaded.encryption
    assert encryption_of(clear, loaded.encryption) is None
    assert encryption_of(TierConfig(type="t"), None) is None
    assert load_sources(dump_sources(loaded.encryption)) == loaded.encryption
    mistakes = [
        ({"key": {"env": "NOT_THERE"}}, "encryption.key.env: environment variable 'NOT_THERE' is not set"),
        (
            {"key": {"env": "KV_KEY"}, "previous": {"env": "KV_KEY"}},
            "encryption.previous: the same key as 'encryption.key'",
        ),
        ({}, "encryption: 'key' is missing"),
        ({"key": {}}, "encryption.key: expected one of 'file', 'env' and 'command', got none"),
        ({"key": {"env": "A", "file": "b"}}, "expected one of 'file', 'env' and 'command', got file and env"),
        ({"key": {"command": "kms"}}, "encryption.key.command: expected a list: a program and its arguments"),
        ({"key": {"fiel": "x"}}, "unknown option 'fiel'. Did you mean 'file'?"),
    ]
    for encryption, words in mistakes:
        with pytest.raises(ConfigError) as raised:
            load_config(config(encryption))
        assert any(words in line for line in raised.value.problems), raised.value.problems


def test_a_key_that_was_written_into_the_config_by_mistake_stands_in_no_line_about_it():
    for encryption in (
        TEXT,
        {"key": TEXT},
        {"key": {"file": TEXT}},
        {"key": {"env": TEXT}},
        {"key": {"command": TEXT}},
    ):
        with pytest.raises(ConfigError) as raised:
            load_config(config(encryption))
        assert TEXT[:12] not in str(raised.value), encryption
        assert "encryption" in str(raised.value)


def test_a_tenant_s_keys_are_checked_when_the_config_is_loaded(monkeypatch):
    monkeypatch.setenv("KV_KEY", TEXT)
    monkeypatch.setenv("KV_BLUE", base64.b64encode(RAW[::-1]).decode())
    blue = {"key": {"env": "KV_BLUE"}, "previous": {"env": "KV_KEY"}}

    def load(keys, tenants):
        return load_config(config({"key": {"env": "KV_KEY"}, "tenants": keys}) | {"tenants": tenants})

    encryption = load({"blue": blue}, {}).encryption
    assert load_sources(dump_sources(encryption)) == encryption
    assert encryption.of("blue").key.env == "KV_BLUE"
    assert encryption.of("red") is encryption.of("") is encryption
    load({"blue": blue}, {"unknown": False, "named": {"blue": {}}})
    each = load({"blue": blue, "*": {"key": {"file": "/{tenant}/kv.key"}}}, {}).encryption
    assert load_sources(dump_sources(each)) == each
    assert (each.of("blue").key.env, each.of("red").key.file, each.of("")) == ("KV_BLUE", "/red/kv.key", each)
    missing = {"key": {"file": "/nowhere/kv.key"}}
    mistakes = [
        ({"blue": blue}, None, "encryption.tenants: the config has no 'tenants'; add 'tenants: {}'"),
        ({"blue": blue}, {"unknown": False}, "encryption.tenants.blue: this tenant is not among 'tenants"),
        ({"Blue": blue}, {}, "encryption.tenants: tenant 'Blue' cannot be used; expected 1 to 64 of a-z"),
        ({"blue": missing}, {}, "encryption.tenants.blue.key.file: cannot read '/nowhere/kv.key': No such file"),
        ({"blue": {**blue, "previous": {"env": "KV_BLUE"}}}, {}, "encryption.tenants.blue.previous: the same key as"),
        ({"blue": {}}, {}, "encryption.tenants.blue: 'key' is missing"),
        ({"blue": None}, {}, "encryption.tenants.blue: expected a mapping of options, got nothing"),
        ({"blue": {**blue, "tenants": {}}}, {}, "unknown option 'tenants'"),
        ({TEXT: blue}, {}, "encryption.tenants: a name here looks like a key"),
        ({"blue": TEXT}, {}, "encryption.tenants: expected a mapping with 'key' for 'blue'"),
        ({"*": blue}, {}, "'*': expected a file with '{tenant}' in its path: each tenant has its own"),
        ({"*": {"key": {"command": ["kms"]}}}, {}, "encryption.tenants: '*': expected a file with '{tenant}'"),
        ({"*": missing}, {}, "encryption.tenants: '*': expected a file with '{tenant}' in its path"),
        ({"*": {"key": {"file": "/no/{tenant}/a"}}}, {}, "encryption.tenants.*.key.file: there is no folder '/no'"),
        (TEXT, {}, "encryption.tenants: expected a mapping of tenants, each with 'key'"),
    ]
    for keys, tenants, words in mistakes:
        with pytest.raises(ConfigError) as raised:
            load(keys, tenants)
        [line] = raised.value.problems
        assert words in line
        assert TEXT[:12] not in line


def test_a_tier_that_cannot_be_encrypted_is_refused_and_not_stored_in_clear():
    managed = {"type": "memory-async", "max_blocks": 8}
    with pytest.raises(
        ConfigError, match=r"secondary\[0\] \(memory-async\): values cannot be encrypted here.*encrypt: false"
    ):
        load_config(config({"key": {"command": ["true"]}}, managed))
    load_config(config({"key": {"command": ["true"]}}, {**managed, "encrypt": False}))
    with pytest.raises(ConfigError, match="there is no key to encrypt with; add 'encryption'"):
        load_config(config(None, {**MEMORY, "encrypt": True}))


def test_encryption_and_compression_of_one_tier_exclude_each_other():
    compressed = {**MEMORY, "compression": "zstd"}
    with pytest.raises(ConfigError, match=r"secondary\[0\] \(memory\): compression: encrypted values are not"):
        load_config(config({"key": {"command": ["true"]}}, compressed))
    load_config(config({"key": {"command": ["true"]}}, {**compressed, "encrypt": False}))
    load_config(config(None, compressed))


def test_without_the_library_the_start_ends_with_what_to_install(monkeypatch):
    from kvtiers.encryption import key_source, keys

    monkeypatch.setattr(key_source, "find_spec", lambda name: None)
    assert check_sources(EncryptionConfig(key={"command": ["x"]})) == [keys.INSTALL]
    keys.load_library.cache_clear()
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    try:
        with pytest.raises(ConfigError, match=r"pip install 'kvtiers\[encryption\]'"):
            open_keys(EncryptionConfig(key={"command": ["x"]}), "prod")
    finally:
        keys.load_library.cache_clear()
