"""No module is a leftover: one under 80 lines with one importer is part of that importer, or has a reason not to be.

No function has 60 lines or more, and each module's docstring begins with what the module is, as a noun phrase.
"""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHORT = 80
OF_ITS_OWN = {
    "kvtiers.testing.killed_writer": "a program of its own, which the kit kills",
    "kvtiers.testing.secondary_tier.quotas": "tests of an ability, as promises.py has those of every tier",
    "kvtiers.cli.store.proof": "what a deletion's proof looks at; commands.py has the command line",
    "kvtiers_example.memory_store": "the template for a store: the entry point imports it late, in the tier host alone",
    "kvtiers_replay.rag_workload": "a workload, as the others beside it; benchmarks import it, too",
    "kvtiers_azure.failures": "what Azure says, as the other services' failures",
    "kvtiers_gcs.store": "the entry point imports it late, in the tier host alone",
    "kvtiers_objectstore.speed": "`kvtiers check` alone imports it, late",
    "kvtiers_transformers.weights": "a digest of all weights, which identity.py has for one of a model's facts",
    "kvtiers_s3.diagnosis": "`kvtiers check` alone imports it, late",
    "kvtiers_s3.store": "the entry point imports it late, in the tier host alone",
}


def modules() -> dict[str, Path]:
    """Every module of every distribution, by its dotted name; a package by its own."""
    found = {}
    for place in ("core", "replay", "integrations/*", "libraries/*", "plugins/*"):
        for source in ROOT.glob(f"{place}/src"):
            for path in source.rglob("*.py"):
                parts = path.relative_to(source).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported_by(path: Path) -> set[str]:
    """What a file imports, late imports and those for annotations included: a module, or a name of one."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return names


def short_modules_with_one_importer() -> dict[str, str]:
    """Each such module, with its importer. What nothing imports is an entry point, or a program."""
    known = modules()
    importers = defaultdict(set)
    for importer, path in known.items():
        for name in imported_by(path) & known.keys() - {importer}:
            importers[name].add(importer)
    return {
        name: min(importers[name])
        for name, path in known.items()
        if path.name != "__init__.py"
        and len(importers[name]) == 1
        and len(path.read_text("utf-8").splitlines()) < SHORT
    }


def test_a_short_module_with_one_importer_is_part_of_it_or_has_a_reason():
    found = short_modules_with_one_importer()
    assert len(modules()) > 250
    leftovers = {name: importer for name, importer in found.items() if name not in OF_ITS_OWN}
    assert not leftovers, "merge each into its importer, or say in OF_ITS_OWN why it is a thought of its own"


def test_each_reason_is_still_needed():
    assert OF_ITS_OWN.keys() - short_modules_with_one_importer().keys() == set()


# Written beside this rule, as those of OF_ITS_OWN that are to be merged.
TO_BE_REWRITTEN = {"hit_policies", "identity", "server", "guards"}
QUESTIONS = re.compile(r"(What|Which|How|Where|Who|Whose|Whether|When|Why|That|If)\b")
LONGEST = 59  # lines of a function, its docstring and decorators aside
PLACES = (
    "core/src",
    "replay/src",
    "integrations/*/src",
    "integrations/*/benchmarks",
    "plugins/*/src",
    "benchmarks",
    "examples",
    "tools",
)


def sources() -> list[Path]:
    """Every Python file but those of tests."""
    return sorted(path for place in PLACES for folder in ROOT.glob(place) for path in folder.rglob("*.py"))


def test_a_modules_docstring_begins_with_what_the_module_is():
    heads = {
        path.relative_to(ROOT).as_posix(): ast.get_docstring(ast.parse(path.read_text("utf-8"))) for path in sources()
    }
    assert len(heads) > 380
    found = {name: head.splitlines()[0] for name, head in heads.items() if head and QUESTIONS.match(head)}
    assert {name: head for name, head in found.items() if Path(name).stem not in TO_BE_REWRITTEN} == {}


def test_no_function_is_longer_than_a_screen():
    found = {}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno + 1 > LONGEST:
                found[f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"] = node.end_lineno - node.lineno + 1
    assert found == {}
