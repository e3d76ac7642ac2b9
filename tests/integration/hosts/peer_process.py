"""An engine in a process of its own: runs the code that comes in, a line of JSON each, and answers with values."""

import ast
import importlib.util
import json
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
_spec = importlib.util.spec_from_file_location("kvtiers_hosts_harness", Path(__file__).with_name("harness.py"))
bench = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(bench)


def run(code, names):
    """Run code; return the value of its last expression."""
    body = ast.parse(code).body
    last = ast.Expression(body.pop().value) if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "<party>", "exec"), names)
    return None if last is None else eval(compile(last, "<party>", "eval"), names)


def main():
    # A test asks; the engine's own stdout stays free for what the test wants to see there.
    answers = open(int(sys.argv[2]), "w", buffering=1)  # noqa: SIM115, PTH123 -- it lasts as long as the process
    names = {"bench": bench, "Engine": bench.Engine, "keys": bench.keys, "key": bench.key}
    for line in sys.stdin:
        try:
            answer = {"value": run(json.loads(line), names)}
        except Exception as error:  # noqa: BLE001 -- whatever it is, the test wants it
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
