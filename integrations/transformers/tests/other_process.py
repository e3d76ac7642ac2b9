"""A process that generates with each model over a directory and prints the tokens: other_process.py FOLDER NAMES."""

import json
import sys

from conftest import OPTIONS, greedy, tiers
from models import make, prompt

from kvtiers_transformers import PrefixCache

if __name__ == "__main__":
    found = {}
    for name in sys.argv[2:]:
        with PrefixCache(tiers(f"{sys.argv[1]}/{name}"), make(name), **OPTIONS) as cache:
            found[name] = greedy(cache, prompt(150))
            assert cache.stats()["loaded_tokens"] == 0
    sys.stdout.write(json.dumps(found) + "\n")
