"""A worker: one integration's real classes in a process of the integration's own environment, driven line by line.

``python worker.py INTEGRATION``. Each line of its input is a command as JSON, ``{"do": NAME, ...}``, and is answered by
a line: the result, or ``{"error": TEXT}``. Whatever else the process prints goes to its standard error.
"""

import atexit
import contextlib
import importlib
import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent


class Worker:
    """The engines of one integration, by the names that the commands give them."""

    def __init__(self, driver):
        self._driver, self._engines = driver, {}

    def release(self):
        return self._driver.release()

    def open(self, name, config, weights):
        self._engines[name] = self._driver.open(config, weights)

    def put(self, name, seed):
        return self._engines[name].put(seed)

    def get(self, name, seed):
        return self._engines[name].get(seed)

    def layouts(self, name):
        return self._engines[name].inside("layouts")

    def count(self, name):
        return self._engines[name].inside("count")

    def damage(self, name):
        return self._engines[name].inside("damage")

    def trust(self):
        """Have every value taken as sound from now on: the control, in which wrong bytes are found."""
        from kvtiers.layout.seal import PlainSeal, SealVerdict

        PlainSeal.check = lambda *_: SealVerdict.OK

    def close(self, name):
        self._engines.pop(name).close()

    def end(self):
        """Close what is open: the suite has ended, or was ended."""
        for name in list(self._engines):
            with contextlib.suppress(Exception):
                self.close(name)


def keep_layouts():
    """Keep the layouts of all engines: a client forgets its own when it has its names."""
    from kvtiers.layout.storage_name import StorageNames

    kept, of_layout = [], StorageNames.of_layout
    StorageNames.of_layout = lambda namespace, layout: kept.append(layout) or of_layout(namespace, layout)


def main():
    # Some engines write to the standard output.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.insert(0, str(HERE / "drivers"))
    keep_layouts()
    worker = Worker(importlib.import_module(f"{sys.argv[1].replace('-', '_')}_driver"))
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"is": getattr(worker, command.pop("do"))(**command)}
        except Exception as error:
            import traceback

            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    worker.end()
    # Some engines have threads that would keep it.
    atexit._run_exitfuncs()
    os._exit(0)


if __name__ == "__main__":
    main()
