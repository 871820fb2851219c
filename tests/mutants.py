"""Wrong answers as one-line changes of the shipped solution, so that a changed solution changes them or fails loudly.

MUTANTS = [("exercise", "what the solution says", "what is planted", "a word of the verdict")]
"""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from course_checks.harness.checking import Exercise, Lab, Verdict

ROOT = Path(__file__).resolve().parent.parent
Mutant = tuple[str, str, str, str]


@functools.cache
def solution(lab: Lab) -> tuple[str, dict[str, str]]:
    """What the notebook imports and defines beside the exercises, and each exercise's cell by the name of its check."""
    cells = json.loads((ROOT / "solutions" / f"{lab.name}.ipynb").read_text(encoding="utf-8"))["cells"]
    shared, answers, answer = [], {}, ""
    for cell in (
        cell for cell in cells if cell["cell_type"] == "code" and "colab" not in cell["metadata"].get("tags", ())
    ):
        source = "".join(cell["source"])
        defined = _defined(source)
        if "exercise" in cell["metadata"].get("tags", ()):
            answer = source
        elif answer:
            check = re.search(r"^check\.(\w+)\(", source, re.MULTILINE)
            assert check, "an exercise's cell is followed by its check"
            answers[check[1]], answer = answer, ""
        else:
            imports = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
            shared += [ast.get_source_segment(source, node) for node in [*imports, *defined]]
    assert set(answers) == set(lab.exercises)
    return "\n\n".join(shared), answers


def judged(lab: Lab, exercise: str, source: str) -> Verdict:
    """The check's verdict on a cell whose last definition is the exercise's function or class."""
    shared, answers = solution(lab)
    space: dict[str, Any] = {}
    others = [answer for name, answer in answers.items() if name != exercise]
    for part in (shared, *others, source):
        exec(compile(part, f"<ipython-{exercise}>", "exec"), space)
    return getattr(lab, exercise)(space[_defined(source)[-1].name])


def _defined(source: str) -> list[ast.FunctionDef | ast.ClassDef]:
    return [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]


def survivors(lab: Lab, exercise: str, mutants: Iterable[Mutant]) -> list[str]:
    """The planted answers of an exercise that do not hear their word, each in one line."""
    answer, wrong = solution(lab)[1][exercise], []
    planted = [mutant for mutant in mutants if mutant[0] == exercise]
    assert planted, f"nothing is planted in {exercise}"
    for _, old, new, word in planted:
        assert answer.count(old) == 1, f"{exercise}: the solution has {old!r} {answer.count(old)} times"
        verdict = judged(lab, exercise, answer.replace(old, new))
        crashed = "your code raised" in verdict.message and "raised" not in word
        if verdict.status != "not yet" or word not in verdict.message or crashed:
            wrong.append(f"{new!r} should hear {word!r}, and heard {str(verdict)!r}")
    return wrong


def misjudged(lab: Lab, planted: ModuleType, exercise: str) -> list[str]:
    """The shipped answer and those written another way that do not pass, and the planted ones that do not hear their word."""
    shipped = judged(lab, exercise, solution(lab)[1][exercise])
    assert shipped.status == "passed" and shipped.message, shipped
    return rejected(lab, {exercise: planted.RIGHT.get(exercise, [])}) + survivors(lab, exercise, planted.MUTANTS)


def unheard(check: Exercise, file: Path, planted: Iterable[tuple[str, str, str]], folder: Path) -> list[str]:
    """The same for what is planted in a file: (what it says, what is planted, a word of the verdict)."""
    text, wrong = file.read_text(encoding="utf-8"), []
    for old, new, word in planted:
        assert text.count(old) == 1, old
        (folder / f"planted{file.suffix}").write_text(text.replace(old, new), encoding="utf-8")
        verdict = check(lambda: folder / f"planted{file.suffix}")
        wrong += [] if verdict.status == "not yet" and word in verdict.message else [f"{new!r}: {verdict}"]
    return wrong


def rejected(lab: Lab, right: Mapping[str, Iterable[str]]) -> list[str]:
    """Right answers, written another way, that do not pass."""
    verdicts = [(name, judged(lab, name, source)) for name, sources in right.items() for source in sources]
    return [f"{name}: {verdict}" for name, verdict in verdicts if verdict.status != "passed"]
