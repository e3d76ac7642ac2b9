"""Act 3. It is safe: bits are flipped in all stored values, and an engine is asked for what they hold."""

import random
import shutil
from pathlib import Path

from demo.acts import expect
from demo.process import Answer, EngineProcess
from demo.setting import Setting
from demo.table import Table

__all__ = ["flip_bits", "it_is_safe"]

_PAGE = 4096


def it_is_safe(setting: Setting, *, check_seals: bool = True) -> str:
    """Load what was stored and what was damaged, with the check and (the control) without.

    ``check_seals`` False breaks the promise, and so the act: for the test that it can fail.
    """
    act = _Act(setting)
    act.store()
    act.load_sound(check=check_seals)
    found = act.load_damaged(check=check_seals)
    act.load_sound(check=False)
    act.control()
    return f"{found} of {act.flipped} damaged values were read, and every one was noticed; without the check: garbage"


class _Act:
    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._prompt = setting.prompt(1, 1)
        self._tokens: list[int] = []
        self._runs = 0
        self.flipped = 0
        self._table = Table(
            ("values", -12), ("check", -5), ("computed", 14), ("loaded", 8), ("found damaged", 13), ("tokens", -9)
        )

    def store(self) -> None:
        """Compute a document and store it. Damaged values are removed when they are read, so there are two sets."""
        answer, _ = self._run("stored", check=True)
        self._tokens = answer.tokens
        self._row("none yet", "on", answer, 0, "")
        stored, flipped, control = (self._setting.folder / name for name in ("stored", "flipped", "control"))
        shutil.copytree(stored, flipped)
        self.flipped = flip_bits(flipped)
        shutil.copytree(flipped, control)

    def load_sound(self, *, check: bool) -> None:
        """Have a new engine answer from what was stored."""
        answer, _ = self._load("as stored", "stored", check=check)
        expect(answer.tokens == self._tokens, "values that are undamaged changed the tokens")
        loaded = answer.saved >= self._setting.document_tokens
        expect(loaded, f"of values that are undamaged {answer.saved:,} tokens were loaded")

    def load_damaged(self, *, check: bool) -> int:
        """Have a new engine answer from damaged values; return how many of them it noticed."""
        answer, found = self._load("bits flipped", "flipped", check=check)
        expect(answer.tokens == self._tokens, "damaged values changed the tokens")
        expect(found > 0 and not answer.saved, f"{found} damaged values noticed, {answer.saved:,} tokens loaded")
        return found

    def control(self) -> None:
        """Do the same without the check: the tokens do depend on the bytes, so it is the check that has saved them."""
        answer, _ = self._load("bits flipped", "control", check=False, good=True)
        changed = answer.tokens != self._tokens
        expect(changed, "the control: without the check, damaged values changed no token, so the act shows nothing")

    def _load(self, values: str, folder: str, *, check: bool, good: bool = False) -> tuple[Answer, int]:
        answer, found = self._run(folder, check=check)
        same = answer.tokens == self._tokens
        verdict = "the same" if same else "DIFFERENT"
        self._row(values, "on" if check else "OFF", answer, found, verdict, good=good or same)
        return answer, found

    def _run(self, folder: str, *, check: bool) -> tuple[Answer, int]:
        self._runs += 1
        # The check can be switched off in the engine's own process alone, see ``serve.py``.
        io = {} if check else {"io": "thread"}
        config = self._setting.config(self._setting.fs(folder, required=True, **io), documents=2)
        options = self._setting.engine(config, check_seals=check)
        with EngineProcess(self._setting.folder, f"run-{self._runs}", options) as engine:
            answer = engine.ask(self._prompt, self._setting.new_tokens)
            expect(engine.settle(), "the tier was still busy a minute after a question")
            return answer, int(engine.stats()["tiers"]["fs"]["own"]["seal_failures"])

    def _row(self, values: str, check: str, answer: Answer, found: int, verdict: str, *, good: bool = True) -> None:
        whole = len(self._prompt)
        computed = f"{whole - answer.saved:,} of {whole:,}"
        self._table.row(values, check, computed, f"{answer.saved:,}", str(found), verdict, good=good)


def flip_bits(folder: Path, seed: int = 0) -> int:
    """Flip one bit in every page of every value in an fs tier's directory; return how many values there are."""
    chance = random.Random(seed)
    values = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    for path in values:
        content = bytearray(path.read_bytes())
        for page in range(0, len(content), _PAGE):
            content[page + chance.randrange(_PAGE)] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
    return len(values)
