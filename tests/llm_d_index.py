"""An index that takes KV events as llm-d's router does, written from what its code does with them, to test ours.

``tests/golden/kv_events-llm-d.json`` holds batches that its own decoder and index were given, and what they found
afterwards; ``tests/unit/kv_events/test_llm_d.py`` compares this index with that.
"""

from collections import Counter, defaultdict

import msgspec

INDEXED = {"full_attention", "mla_attention", "sink_full_attention"}
STORED = ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"]
STORED += ["extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"]
FIELDS = {"BlockStored": STORED, "BlockRemoved": ["block_hashes", "medium", "group_idx"], "AllBlocksCleared": []}
SHORTEST_HASH = 1 << 32
"""A hash below this is written in fewer bytes, and llm-d's decoder refuses the batch."""


class LlmDIndex:
    """Where the blocks of prompts are, by the events of one pod."""

    def __init__(self, block_size, model="tiny", pod="pod"):
        self._block_size, self._model, self._pod = block_size, model, pod
        self._places = defaultdict(set)
        self._block_of = {}
        self._kinds = {}
        self._references = Counter()

    def take(self, batch):
        """Take the bytes of a batch."""
        for event in msgspec.msgpack.decode(batch)[1]:
            name = event["type"] if isinstance(event, dict) else event[0]
            values = [event.get(field) for field in FIELDS[name]] if isinstance(event, dict) else event[1:]
            fields = dict(zip(FIELDS[name], [*values, *[None] * len(FIELDS[name])], strict=False))
            if name == "AllBlocksCleared":
                self._places.clear()
                self._references.clear()
                continue
            hashes = [_number(each) for each in fields["block_hashes"]]
            (self._store if name == "BlockStored" else self._remove)(hashes, fields)

    def find(self, tokens, model=None, salt=None):
        """Return for each block of a prompt the places where it is."""
        above, found = model or self._model, []
        for number, some in enumerate(self._in_blocks(tokens)):
            above = (above, some, (salt,) if salt and not number else ())
            found.append(sorted(self._places.get(above, ())))
        return found

    def _in_blocks(self, tokens):
        ends = range(self._block_size, len(tokens) + 1, self._block_size)
        return [tuple(tokens[end - self._block_size : end]) for end in ends]

    def _place(self, fields):
        group = "" if fields["group_idx"] is None else f"[group={fields['group_idx']}]"
        return f"{self._pod}@{(fields['medium'] or 'gpu').lower()}{group}"

    def _store(self, hashes, fields):
        group, kind, tokens, size = (fields[name] for name in ("group_idx", "kv_cache_spec_kind", *STORED[2:4]))
        if group is not None:
            kind = self._kinds[group] = kind or self._kinds.get(group)
            if kind not in INDEXED or (tokens and (size <= 0 or len(tokens) != size * len(hashes))):
                return
        above = fields["lora_name"] or self._model
        if fields["parent_block_hash"] is not None:
            if (parent := _number(fields["parent_block_hash"])) not in self._block_of:
                return
            above = self._block_of[parent]
        blocks = []
        extra = fields["extra_keys"] or [None] * len(hashes)
        for some, more in zip(self._in_blocks(tokens), extra, strict=False):
            above = (above, some, tuple(each for each in more or () if isinstance(each, str)))
            blocks.append(above)
        if tokens:
            self._block_of.update(zip(hashes, blocks, strict=True))
        else:
            blocks = [self._block_of[each] for each in hashes if each in self._block_of]
        for block in blocks:
            self._places[block].add(self._place(fields))
        if blocks:
            self._references.update((self._place(fields), each) for each in hashes)

    def _remove(self, hashes, fields):
        if fields["group_idx"] is not None and self._kinds.get(fields["group_idx"]) not in INDEXED:
            return
        place = self._place(fields)
        for each in hashes:
            self._references[place, each] -= 1
            if self._references[place, each] > 0:
                continue
            del self._references[place, each]
            if (block := self._block_of.get(each)) is not None:
                self._places[block].discard(place)
                if not self._places[block]:
                    del self._places[block], self._block_of[each]


def _number(block_hash):
    if isinstance(block_hash, bytes):
        return int.from_bytes(block_hash[-8:], "big")
    assert block_hash >= SHORTEST_HASH, "llm-d's decoder refuses the whole batch"
    return block_hash
