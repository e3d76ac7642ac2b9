"""Agents' sessions as a folder of traces for ``aiperf`` (its type ``weka_trace``): each turn has all turns before it.

``python integrations/vllm/benchmarks/clients/agents.py FOLDER SEED``
"""

import json
import random
import sys
from pathlib import Path

BLOCK = 64
SYSTEM = 8  # blocks of a prompt that all sessions begin with
SESSIONS, TURNS = 6, 5


def main() -> None:
    folder, seed = Path(sys.argv[1]), int(sys.argv[2])
    folder.mkdir()
    chance = random.Random(seed)
    for number in range(SESSIONS):
        blocks, unused, requests = list(range(1, SYSTEM + 1)), 1000, []
        for turn in range(TURNS):
            added = chance.randint(3, 7)
            blocks += range(unused, unused + added)
            unused += added
            request = {"t": float(turn), "type": "n", "model": "tiny", "in": len(blocks) * BLOCK, "out": 8}
            request |= {"hash_ids": list(blocks), "input_types": ["text"], "output_types": ["text"]}
            requests.append(request | {"stop": "end_turn", "api_time": 0.5, "think_time": 0.2})
        session = {"id": f"{seed}-{number}", "models": ["tiny"], "block_size": BLOCK, "hash_id_scope": "local"}
        session |= {"tool_tokens": 0, "system_tokens": SYSTEM * BLOCK, "requests": requests}
        (folder / f"{number}.json").write_text(json.dumps(session))


if __name__ == "__main__":
    main()
