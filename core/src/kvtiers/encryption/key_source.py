"""The reading of keys from files, environment variables and commands; each problem is one line without a byte of a key.

Files and variables are looked at when a config is loaded, so that a mistake ends the start; commands are not run then.
A tier host reads all of them when it opens its tier, and keeps what is derived; the engine's process keeps no key.
A tenant's keys are read by themselves: where they cannot be had, no other tenant is affected (``tenant_keys.py``;
``first_use_keys.py`` for those of ``"*"``).
"""

import base64
import binascii
import contextlib
import logging
import os
import re
import signal
import stat
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from kvtiers._process import spawn
from kvtiers.api import ConfigError
from kvtiers.api.config import EACH_OTHER_TENANT
from kvtiers.api.files import read_file
from kvtiers.api.units import format_duration
from kvtiers.encryption.config import EncryptionConfig, KeySource
from kvtiers.encryption.keys import INSTALL, KEY_BYTES, KeyRing, SealingKey, load_library
from kvtiers.layout.storage_name import check_tenant

__all__ = ["check_sources", "open_file_warnings", "open_keys", "read_key"]

_log = logging.getLogger("kvtiers.secondary")
_MAKE = "expected 32 random bytes as base64 (head -c 32 /dev/urandom | base64), or the 32 bytes themselves"
_LARGEST = 1024
_LONGEST_LINE = 200
_KILLED_SECONDS = 1.0
_MAY_BE_A_KEY = re.compile(r"[A-Za-z0-9+/_=-]{24,}")


class _NoKeyError(ConfigError):
    """There is nothing where a key would be: no such file, or a command that prints nothing."""


def open_keys(config: EncryptionConfig, namespace: str, tenant: str = "") -> KeyRing:
    """Read and derive the live keys of a namespace, or a tenant's own; ConfigError, in one line, if one is not there.

    ``tenant``: "" or one without keys of its own: those of the namespace, in which ``KeyRing.add`` puts the tenants'.
    One that is not listed, but has its own by ``"*"``, need have no previous key.
    """
    try:
        return _open_keys(config, namespace, tenant)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 -- of a library; its text may hold a part of the key
        problem = f"{_place(config, tenant)}: its keys cannot be read: {type(error).__name__}"
    raise ConfigError(problem)


def _open_keys(config: EncryptionConfig, namespace: str, tenant: str) -> KeyRing:
    load_library()
    tenant = check_tenant(tenant) if config.has_own(tenant) else ""  # it may be put into the path of a file
    keys: list[SealingKey] = []
    for where, source in _sources(config, tenant):
        try:
            keys.append(SealingKey(read_key(source, where, namespace, tenant), namespace))
        except _NoKeyError:
            if not keys or tenant in config.tenants:
                raise
    if tenant:
        return KeyRing(*keys, where=_place(config, tenant))
    return KeyRing(*keys, tenants=config.listed, others_have_own=config.others_have_own)


def check_sources(config: EncryptionConfig) -> list[str]:
    """Return what is wrong with files, variables and the installation, a line each; runs no command."""
    # Looked for, not imported: the engine's process does not need it.
    problems = [] if find_spec("cryptography") else [INSTALL]
    for tenant in ("", *config.listed):
        problems += _problems_of(config, tenant)
    for where, source in _sources(config, EACH_OTHER_TENANT) if config.others_have_own else ():
        if not source.folder.is_dir():
            problems.append(f"{where}.file: there is no folder {str(source.folder)!r}")
    return problems


def _problems_of(config: EncryptionConfig, tenant: str) -> list[str]:
    problems: list[str] = []
    found: dict[bytes, str] = {}
    for where, source in _sources(config, tenant):
        if source.command is not None:
            continue
        try:
            key = read_key(source, where, "")
        except ConfigError as error:
            problems.append(str(error))
            continue
        if key in found:
            problems.append(f"{where}: the same key as {found[key]!r}; leave it out, or correct one of them")
        found[key] = where
    return problems


def open_file_warnings(config: EncryptionConfig) -> Iterator[str]:
    """Yield a line for each key file that every user of this machine can read or write."""
    for where, source in (each for tenant in ("", *config.listed) for each in _sources(config, tenant)):
        if source.file is None:
            continue
        with contextlib.suppress(OSError):  # then reading it is the problem
            mode = stat.S_IMODE(Path(source.file).stat().st_mode)
            if mode & (stat.S_IROTH | stat.S_IWOTH):
                what = "write" if mode & stat.S_IWOTH else "read"
                yield f"{where}: every user of this machine can {what} {source.file} (mode {mode:04o}); chmod 600 it"


def read_key(source: KeySource, where: str, namespace: str, tenant: str = "") -> bytes:
    """Return the 32 bytes of one key. ConfigError, beginning with ``where``, if there is none."""
    if source.file is not None:
        try:
            content = read_file(source.file, _LARGEST)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            kind = _NoKeyError if isinstance(error, FileNotFoundError) else ConfigError
            raise kind(f"{where}.file: cannot read {source.file!r}: {reason}") from None
    elif source.env is not None:
        text = os.environ.get(source.env)
        if text is None:
            raise ConfigError(f"{where}.env: environment variable {source.env!r} is not set")
        content = text.encode("utf-8", "surrogateescape")
    else:
        content = _output_of(source, where, namespace, tenant)
        if not content:
            raise _NoKeyError(f"{where}: {source.in_words()} has printed nothing; {_MAKE}")
    return _decoded(content, f"{where}: {source.in_words()}")


def _place(config: EncryptionConfig, tenant: str) -> str:
    if not config.has_own(tenant):
        return "encryption"
    return f"encryption.tenants.{tenant if tenant in config.tenants else EACH_OTHER_TENANT}"


def _sources(config: EncryptionConfig, tenant: str) -> Iterator[tuple[str, KeySource]]:
    where, sources = _place(config, tenant), config.of(tenant)
    yield f"{where}.key", sources.key
    if sources.previous is not None:
        yield f"{where}.previous", sources.previous


def _decoded(content: bytes, where: str) -> bytes:
    """Return the key in what a source gave. A text of 32 characters is taken for a password, and refused."""
    key, text = content, content.strip()
    if len(content) != KEY_BYTES or (text.isascii() and text.decode("ascii").isprintable()):
        try:
            key = base64.b64decode(text.replace(b"-", b"+").replace(b"_", b"/"), validate=True)
        except binascii.Error:
            raise ConfigError(f"{where} has no key ({len(content)} bytes that are no base64); {_MAKE}") from None
    if len(key) != KEY_BYTES:
        raise ConfigError(f"{where} has {len(key)} bytes; {_MAKE}")
    if len(set(key)) == 1:
        raise ConfigError(f"{where} has one byte, repeated; {_MAKE}")
    return key


def _output_of(source: KeySource, where: str, namespace: str, tenant: str) -> bytes:
    """Run the command, in a process group of its own, which is killed if it does not end in time."""
    import subprocess  # here, since few configs have a command

    command = [*(source.command or ())]
    what = f"{where}.command: {command[0]!r}"
    try:
        process = spawn(
            "kvtiers.encryption.key_command",
            [namespace, tenant, *command],
            name="key command",
            pass_fds=(),
            process_group=0,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except OSError as error:
        raise ConfigError(f"{what} cannot be started: {error.strerror}") from None
    with process:
        try:
            content, complaint = process.communicate(timeout=source.timeout)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # what has left the group has the pipe, too
                process.communicate(timeout=_KILLED_SECONDS)
            raise ConfigError(f"{what} gave no key within {format_duration(source.timeout)}") from None
    if process.returncode:
        raise ConfigError(f"{what} failed with exit status {process.returncode}{_last_line(complaint)}")
    return content


def _last_line(complaint: bytes) -> str:
    """Return the last line that the command wrote to its standard error, without what may be a key."""
    lines = complaint.decode("utf-8", "replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    text = _MAY_BE_A_KEY.sub("***", " ".join(last.split()))[:_LONGEST_LINE]
    return f": {text}" if text else ""
