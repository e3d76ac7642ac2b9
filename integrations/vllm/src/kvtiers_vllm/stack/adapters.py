"""The identity of a request's adapter: by the adapter's files, not by its name.

vLLM loads an adapter's files when a request first names it, and again on request (``load_inplace``) or if it has
dropped it meanwhile. So the files are examined when the adapter is named, and digested when it is new; they are
examined again with each request and after each store. If files change without a reload in vLLM, it is uncertain which
adapter vLLM computes with: from then on no request with it uses tiers.

Reads files: runs on a thread of its own (``adapter_digests``).
"""

import logging
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from kvtiers.model_files import digest_of_folder

__all__ = ["Adapters", "Files"]

_log = logging.getLogger("kvtiers.vllm")


class Files(NamedTuple):
    """An adapter's files: names, sizes, times and numbers of each. ``changed``: when the last change was, in ns."""

    each: tuple[tuple[str, int, int, int, int], ...]
    changed: int

    @classmethod
    def of(cls, lora: Any) -> "Files":
        """Look at the files of an adapter. ``lora``: vLLM's request for it."""
        folder = Path(lora.lora_path)
        found = []
        for path in sorted(folder.iterdir()):
            status = path.stat()
            # ctime: a file that is put back has another one, even if its other times are equal.
            found.append((path.name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino))
        changed = max([folder.stat().st_ctime_ns, *(file[3] for file in found)])
        return cls(tuple(found), changed)


class _Seen(NamedTuple):
    """An adapter as it was when vLLM loaded it; ``digest`` is None where that is uncertain."""

    files: tuple[tuple[str, int, int, int, int], ...]
    digest: bytes | None


class Adapters:
    """The adapters of an engine, by vLLM's number."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self.changes: Counter[int] = Counter()
        """Counts of changes of each adapter, in this engine. May be read from any thread."""

    def digest(self, lora: Any, files: Files, *, as_loaded: bool = True) -> bytes | None:
        """Return the digest of an adapter with these files; None if that is uncertain.

        ``as_loaded``: they are surely those that vLLM loads for the request, if it loads any.
        """
        number = lora.lora_int_id
        seen = self._seen.get(number)
        if seen is not None and files.each == seen.files:
            return seen.digest
        if seen is not None and not lora.load_inplace:
            if seen.digest is not None:
                self.lose(lora, "has changed, and vLLM was not asked to reload it (load_inplace)")
            return None
        if not as_loaded:
            self.lose(lora, "has just changed, and vLLM may have loaded it as it was")
            return None
        try:
            digest = digest_of_folder(Path(lora.lora_path)).encode()
            if Files.of(lora).each != files.each:
                self.lose(lora, "is being written")
                return None
        except (OSError, ValueError) as error:
            self.lose(lora, f"{type(error).__name__}: {error}")
            return None
        self._note(number, _Seen(files.each, digest))
        return digest

    def lose(self, lora: Any, why: str) -> None:
        """Record that it is uncertain which adapter vLLM has, until vLLM reloads it."""
        _log.warning("adapter %s: %s: %s; its requests use no tier", lora.lora_name, lora.lora_path, why)
        seen = self._seen.get(lora.lora_int_id)
        self._note(lora.lora_int_id, _Seen(seen.files if seen is not None else (), None))

    def is_unchanged(self, lora: Any) -> bool:
        """Return whether the files are still those that were digested last."""
        seen = self._seen.get(lora.lora_int_id)
        try:
            return seen is not None and Files.of(lora).each == seen.files
        except OSError:
            return False

    def _note(self, number: int, now: _Seen) -> None:
        seen = self._seen.get(number)
        self._seen[number] = now
        if seen is not None and now.digest != seen.digest:
            self.changes[number] += 1
