"""Who shares a block hash of this release of vLLM's: no two requests whose salts differ, while none has an adapter.

Prints the release, and whether a salt and an adapter of one name collide: what ``tags_salt`` in ``releases.py`` says.
"""

import itertools
from types import SimpleNamespace
from typing import Any, get_args

import torch
import vllm
from vllm.config.cache import PrefixCachingHashAlgo
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

BLOCK = 16
NAME = "mine"


def request(
    *, salt: str | None = None, images: tuple[tuple[str, int], ...] = (), embeds: Any = None, adapter: str = ""
) -> Any:
    """Return what a request's hashes are made from. ``images``: an identifier and an offset each."""
    return SimpleNamespace(
        cache_salt=salt,
        mm_features=[
            SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=4))
            for name, offset in images
        ],
        lora_request=SimpleNamespace(lora_name=adapter, lora_path=adapter) if adapter else None,
        prompt_embeds=embeds,
        _prompt_embeds_per_block_hashes={},
    )


def hashes(of: Any, hash_function: Any) -> list[bytes]:
    """Return the hashes of two blocks, chained."""
    found: list[bytes] = []
    image = 0
    for start in (0, BLOCK):
        extra, image = kv_cache_utils.generate_block_hash_extra_keys(of, start, start + BLOCK, image)
        before = found[-1] if found else None
        found.append(kv_cache_utils.hash_block_tokens(hash_function, before, range(BLOCK), extra))
    return found


def main() -> None:
    embeds = torch.arange(2 * BLOCK, dtype=torch.float32).reshape(2 * BLOCK, 1)
    carrier = request(embeds=embeds)
    (digest,), _ = kv_cache_utils.generate_block_hash_extra_keys(carrier, 0, BLOCK, 0)
    # A part by itself, and texts that look like other parts: of an image, of embeddings, of the way that texts are put.
    digest = digest if isinstance(digest, bytes) else digest[-1]
    texts = (
        NAME,
        f"('{NAME}', 0)",
        NAME + "\0",
        digest.hex(),
        digest.decode("latin-1"),
        f"cache_salt{NAME}",
        "cache_salt",
    )
    salts = (None, *texts)
    images = ((), ((NAME, 0),), ((NAME, 4),), ((NAME, 0), (NAME, 4)), (("cache_salt", 0),))
    collides = set()
    for name in get_args(PrefixCachingHashAlgo):
        hash_function = get_hash_fn_by_name(name)
        kv_cache_utils.init_none_hash(hash_function)
        of = {
            (salt, shown, given is not None): hashes(request(salt=salt, images=shown, embeds=given), hash_function)
            for salt, shown, given in itertools.product(salts, images, (None, embeds))
        }
        for place in (0, 1):
            assert len({found[place] for found in of.values()}) == len(of), f"{name}: two requests share block {place}"
        salted, adapted = (hashes(request(**{part: NAME}), hash_function) for part in ("salt", "adapter"))
        collides.add(salted[0] == adapted[0])
    (collide,) = collides
    print(vllm.__version__, "collide" if collide else "apart")  # noqa: T201 -- for the test that reads it


main()
