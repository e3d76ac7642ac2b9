"""Which adapter a request has: by the adapter's files, not by its name.

vLLM loads an adapter when a request first names it, and keeps it. So its files are digested when it is first seen, and
looked at again with each request. Files that have changed though vLLM was not told to load them anew leave it open
which adapter vLLM computes with: from then on no request with it has anything to do with tiers.
"""

import logging
from pathlib import Path
from typing import Any, NamedTuple

from kvtiers.integrations.vllm.weights import digest_of_folder

__all__ = ["Adapters"]

_log = logging.getLogger("kvtiers.vllm")


class _Seen(NamedTuple):
    """An adapter as it was when vLLM loaded it; ``digest`` is None where nobody can tell."""

    files: tuple[tuple[str, int, int, int], ...]
    digest: bytes | None


class Adapters:
    """The adapters of an engine, by vLLM's number."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._changed: set[int] = set()
        self.reloaded: set[int] = set()
        """Adapters that were others before, in this engine."""

    def digest(self, lora: Any) -> bytes | None:
        """Return what stands for the adapter's files; None if that cannot be told. ``lora``: vLLM's request for it."""
        number, folder = lora.lora_int_id, Path(lora.lora_path)
        self._changed.discard(number)
        seen = self._seen.get(number)
        try:
            files = _files(folder)
            if seen is None or (lora.load_inplace and files != seen.files):
                now = _Seen(files, digest_of_folder(folder).encode())
            elif files != seen.files:
                now = _Seen(seen.files, None)
            else:
                return seen.digest
        except (OSError, ValueError) as error:
            _log.warning("adapter %s: %s: %s; its requests use no tier", lora.lora_name, folder, error)
            now = _Seen((), None)
        else:
            if now.digest is None and seen is not None and seen.digest is not None:
                _log.warning(
                    "adapter %s: %s has changed, and vLLM was not told to load it anew (load_inplace); "
                    "its requests use no tier", lora.lora_name, folder,
                )  # fmt: skip
        self._seen[number] = now
        if seen is not None and now.digest != seen.digest:
            self._changed.add(number)
            self.reloaded.add(number)
        return now.digest

    def has_changed(self, number: int) -> bool:
        """Say whether the last question about this adapter found it changed."""
        return number in self._changed


def _files(folder: Path) -> tuple[tuple[str, int, int, int], ...]:
    found = []
    for path in sorted(folder.iterdir()):
        status = path.stat()
        found.append((path.name, status.st_size, status.st_mtime_ns, status.st_ino))
    return tuple(found)
