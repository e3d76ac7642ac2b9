"""Act 2. It is shared: an engine that has computed nothing yet is asked about documents that another one has stored."""

import contextlib

from demo.acts import expect
from demo.process import Answer, EngineProcess
from demo.setting import Setting
from demo.table import Table

__all__ = ["it_is_shared"]


def it_is_shared(setting: Setting) -> str:
    """Run two engines, each with a primary of its own, over one directory; what one computes the other one finds."""
    config = setting.config(setting.fs(required=True), documents=2.5)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(EngineProcess(setting.folder, "first", setting.engine(config)))
        act = _Act(setting)
        for document in (1, 2):
            act.compute("first", first, document)
        second = stack.enter_context(EngineProcess(setting.folder, "second", setting.engine(config)))
        for document in (1, 2):
            act.find("second", second, document)
        act.compute("second", second, 3)
        act.find("first", first, 3)
    return f"two engines, {act.found:,} tokens of which each was computed by one and found by the other"


class _Act:
    def __init__(self, setting: Setting) -> None:
        self.found = 0
        self._setting = setting
        self._known: dict[int, list[int]] = {}
        self._table = Table(
            ("engine", -6), ("process", 8), ("document", 8), ("first token", 11), ("computed", 14),
            ("the rest came from", -30), ("tokens", -9),
        )  # fmt: skip

    def compute(self, name: str, engine: EngineProcess, document: int) -> None:
        """Ask about a document that no engine has computed; go on when it is stored."""
        answer = self._ask(engine, document)
        self._known[document] = answer.tokens
        self._row(name, engine, document, answer, "")
        expect(not answer.saved, f"document {document} was known already: {answer.origin}")
        expect(engine.settle(), "the tier was still busy a minute after a question")

    def find(self, name: str, engine: EngineProcess, document: int) -> None:
        """Ask about a document that the other engine has stored."""
        answer = self._ask(engine, document)
        same = answer.tokens == self._known[document]
        self._row(name, engine, document, answer, "the same" if same else "DIFFERENT", good=same)
        expect(same, f"document {document}: the {name} engine gave other tokens than the one that computed it")
        there = answer.sources.get("fs", 0)
        wanted = self._setting.document_tokens
        expect(there >= wanted, f"document {document}: {there:,} tokens came from the directory, expected {wanted:,}")
        self.found += there

    def _ask(self, engine: EngineProcess, document: int) -> Answer:
        return engine.ask(self._setting.prompt(document, question=1), self._setting.new_tokens)

    def _row(
        self, name: str, engine: EngineProcess, document: int, answer: Answer, verdict: str, *, good: bool = True
    ) -> None:
        whole = len(self._setting.prompt(document, question=1))
        self._table.row(
            name, str(engine.pid), str(document), f"{answer.first_token:.3f} s",
            f"{whole - answer.saved:,} of {whole:,}", answer.origin, verdict, good=good,
        )  # fmt: skip
