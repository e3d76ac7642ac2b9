"""The differences between releases of vLLM that matter here: one row a minor release, in this module alone.

A minor release that is not listed is refused. The layout epoch stands in the fingerprint: releases that share one were
seen to read each other's values in tests; one that was not tested so has an epoch of its own, and misses.
"""

import re
from dataclasses import dataclass
from typing import Any

from kvtiers.api import ConfigError, StartError

__all__ = ["RELEASES", "Release", "release_of", "require_whole_stack", "supported"]


@dataclass(frozen=True, slots=True)
class Release:
    """One minor release.

    ``rows_attribute``: where a job says which rows. ``takes_detector``: tiers are built with a back-pressure detector.
    ``random_seed``: without PYTHONHASHSEED, block hashes differ between processes whatever the algorithm.
    ``tags_salt``: a salt is hashed with a tag. Where it is not, kvtiers' tiers under vLLM's own tiering leave salted
    requests out; the whole stack has keys of its own for them. ``reports_bytes``: a job's result has
    ``transfer_bytes``. ``whole_stack``: kvtiers' own manager and workers run under its connector, which the tests show
    with its engine.

    Where vLLM offers a block whose KV is not that of the tokens and media in its hash, it would be stored under the
    identity of another block, which no seal can show:

    ``trims_session_hashes``: a streaming-input session that goes on drops the hashes of the tokens that it discards
    (vLLM issues 49377 and 49449). Else also vLLM's own prefix cache has other KV under such a hash, and offers it for
    any request that hits there. ``offloads_sessions``: besides, the connector does not append the session's whole block
    table to the one that it has, with each input, and so offer the KV of other blocks. ``leaves_last_token``: a request
    that has ended offers no block with its last sampled token, whose KV is never computed (54193; only with
    ``offload_prompt_only: false``). ``hashes_all_media``: the hash of a block that an answer has filled covers all
    images in it, and not the last one alone (51694; the same).

    Issue 49125, a partial hash that returns to vLLM's own prefix cache, is no column: its block has the KV of those
    tokens, and kvtiers takes no hash from that cache.
    """

    version: str
    rows_attribute: str = "chunk_ids"
    takes_detector: bool = True
    random_seed: bool = False
    tags_salt: bool = True
    reports_bytes: bool = True
    trims_session_hashes: bool = True
    offloads_sessions: bool = True
    leaves_last_token: bool = True
    hashes_all_media: bool = True
    whole_stack: bool = False
    tested: tuple[str, ...] = ()
    """The exact releases that the tests run: 0.31.0 by ``make test-vllm-all`` alone."""

    def epoch(self, version: str) -> str:
        """Return what stands for the layout of this very version in the fingerprint."""
        return f"vllm-{self.version}" if version in self.tested else f"vllm-{version}-untested"

    def offloads_rightly(self, request: Any, *, prompt_only: bool) -> bool:
        """Return whether the blocks that vLLM offers of this request have the tokens and media that it has hashed.

        ``prompt_only``: blocks that an answer has filled are not stored.
        """
        if not self.offloads_sessions and getattr(request, "resumable", False):
            return False
        return prompt_only or self.hashes_all_media or len(getattr(request, "mm_features", None) or ()) < 2

    def spoils_cache(self, request: Any) -> bool:
        """Return whether vLLM's own prefix cache may have other KV than that of its hashes from this request on."""
        return not self.trims_session_hashes and bool(getattr(request, "resumable", False))

    def require_computed(self, *, prompt_only: bool) -> None:
        """ConfigError, one line, if answers are to be stored where vLLM stores a token of them that it never computed.

        ``prompt_only``: as for ``offloads_rightly``.
        """
        if not (prompt_only or self.leaves_last_token):
            raise ConfigError(
                f"offload_prompt_only: false: vLLM {self.version} stores blocks whose last token it never computed; "
                "leave this option out, or use vLLM 0.30 or a later one"
            )


RELEASES = {
    release.version: release
    for release in (
        Release(
            "0.28",
            rows_attribute="block_ids",
            takes_detector=False,
            random_seed=True,
            tags_salt=False,
            reports_bytes=False,
            trims_session_hashes=False,
            offloads_sessions=False,
            leaves_last_token=False,
            hashes_all_media=False,
            tested=("0.28.0",),
        ),
        Release(
            "0.29",
            rows_attribute="block_ids",
            takes_detector=False,
            tags_salt=False,
            reports_bytes=False,
            trims_session_hashes=False,
            offloads_sessions=False,
            leaves_last_token=False,
            hashes_all_media=False,
        ),
        Release(
            "0.30",
            takes_detector=False,
            tags_salt=False,
            reports_bytes=False,
            trims_session_hashes=False,
            offloads_sessions=False,
            hashes_all_media=False,
            whole_stack=True,
            tested=("0.30.0",),
        ),
        Release(
            "0.31",
            trims_session_hashes=False,
            offloads_sessions=False,
            whole_stack=True,
            tested=("0.31.0",),
        ),
        Release("0.32", offloads_sessions=False, whole_stack=True, tested=("0.32.0",)),
        Release("0.33", whole_stack=True, tested=("0.33.0",)),
    )
}


def supported() -> str:
    """Return the supported releases in words."""
    versions = list(RELEASES)
    return f"{versions[0]} to {versions[-1]}"


def release_of(version: str) -> Release:
    """Return the row of this version of vLLM; StartError, one line, if it is not supported."""
    match = re.match(r"(\d+\.\d+)", version)
    release = RELEASES.get(match[1]) if match else None
    if release is None:
        raise StartError(f"kvtiers does not support vLLM {version}; it supports vLLM {supported()}")
    return release


def require_whole_stack(version: str) -> None:
    """StartError, one line, if kvtiers' own manager and workers do not run under this version's connector."""
    if not release_of(version).whole_stack:
        *able, newest = [release.version for release in RELEASES.values() if release.whole_stack]
        raise StartError(
            f"KvtiersConnector runs on vLLM {', '.join(able)} and {newest}, not on {version}; "
            "with this vLLM use kvtiers' tiers under vLLM's own tiering (kvtiers vllm-config)"
        )


def public_version(version: str) -> str:
    """Return a version without what a build adds to it, as ``+cpu``."""
    return version.partition("+")[0]
