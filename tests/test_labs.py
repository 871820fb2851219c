"""From a solution notebook to its lab: no answer left, everything else kept, the same bytes each time."""

import copy
import functools
import json
import sys
import types
from pathlib import Path

import nbformat
import pytest
from refusals import assert_refused

import course_lib.launch
from classroom.authoring import in_step, labs
from course_checks.harness import ranks
from course_checks.harness.checking import Lab
from course_checks.lab03 import hangs

NAME = "94_small"
SCORE = "[ ] 1 Twice as much - not attempted\n[ ] 2 A word - not attempted\nLab 94: 0 of 2 passed\n"


@pytest.fixture(autouse=True)
def checks(monkeypatch, tmp_path):
    """course_checks.lab94 with two exercises."""
    monkeypatch.setenv("BEYOND_ONE_GPU_HOME", str(tmp_path / "home"))
    lab = Lab(NAME, title="Small")

    @lab.exercise("Twice as much", importance=3, difficulty=1, minutes=5)
    def double(f):
        return f(1)

    @lab.exercise("A word", importance=3, difficulty=1, minutes=5)
    def word(f):
        return f()

    module = types.ModuleType("course_checks.lab94")
    module.lab = lab
    monkeypatch.setitem(sys.modules, "course_checks.lab94", module)
    return module


def markdown(cell_id: str, source: str, **metadata) -> dict:
    return {"cell_type": "markdown", "id": cell_id, "metadata": metadata, "source": source.splitlines(keepends=True)}


def code(cell_id: str, source: str, **metadata) -> dict:
    output = {"output_type": "stream", "name": "stdout", "text": ["the SECRET answer\n"]}
    cell = markdown(cell_id, source, execution={"iopub.status.busy": "2026"}, **metadata)
    return cell | {"cell_type": "code", "execution_count": 7, "outputs": [output]}


DOUBLE = '''\
def double(x: int) -> int:
    """Give twice `x`."""
    y = x
    ### BEGIN SOLUTION
    SECRET = 2 * y
    return SECRET
    ### END SOLUTION
'''
CLASS = """\
%matplotlib inline
class Word:
    def __init__(self):
        ### BEGIN SOLUTION
        self.word = "SECRET"
        ### END SOLUTION

    kept = 2
"""
CELLS = [
    markdown("head", "[badge](x)\n\n# Solution 94: small\n\nThe [lesson](x). # Solution 94: not this one"),
    markdown("why", "Why SECRET is the answer.", tags=["solution-only"]),
    code("import", "from course_checks import lab94 as check"),
    markdown("one", "## 1 Twice as much\n\n<details><summary>Hint</summary>Add.</details>"),
    code("double", DOUBLE, tags=["exercise"]),
    code("check1", "check.double(double)"),
    code("class", CLASS),
    code("check2", "check.word(Word)  # again: check.double(double)"),
    code("peek", "print('SECRET')", tags=["solution-only"]),
    code("score", "check.score()", tags=["nbval-check-output"]),
    markdown("end", "Sources."),
]


def notebook(**changes) -> dict:
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}, "widgets": {}}
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": metadata, "cells": copy.deepcopy(CELLS)} | changes


def paths(tree: Path, name: str = NAME) -> tuple[Path, Path]:
    return tree / "solutions" / f"{name}.ipynb", tree / "labs" / f"{name}.ipynb"


def write(tree: Path, content: object, name: str = NAME) -> Path:
    solution, _ = paths(tree, name)
    solution.write_text(json.dumps(content))
    return solution


def changed(tree: Path, cell_id: str, old: str, new: str) -> Path:
    content = notebook()
    [cell] = [cell for cell in content["cells"] if cell["id"] == cell_id]
    source = "".join(cell["source"])
    assert old in source
    cell["source"] = source.replace(old, new)
    return write(tree, content)


@pytest.fixture
def tree(tmp_path) -> Path:
    for folder in ("solutions", "labs"):
        (tmp_path / folder).mkdir()
    write(tmp_path, notebook())
    return tmp_path


def generated(tree: Path) -> dict[str, dict]:
    labs.update(tree, write=True)
    cells = json.loads(paths(tree)[1].read_text())["cells"]
    return {cell["id"]: cell | {"source": "".join(cell["source"])} for cell in cells}


def test_the_lab_keeps_everything_but_the_answers_and_is_the_same_each_time(tree):
    cells = generated(tree)
    assert "SECRET" not in paths(tree)[1].read_text()
    assert list(cells) == ["head", "import", "one", "double", "check1", "class", "check2", "score", "end"]
    assert cells["double"]["source"] == (
        'def double(x: int) -> int:\n    """Give twice `x`."""\n    y = x\n'
        "    raise NotImplementedError  # your code here\n"
    )
    assert cells["class"]["source"].endswith("        raise NotImplementedError  # your code here\n\n    kept = 2\n")
    assert cells["one"]["source"] == "".join(CELLS[3]["source"])
    assert cells["score"]["metadata"] == {"tags": ["nbval-check-output"]}
    assert cells["head"]["source"] == "".join(CELLS[0]["source"]).replace("# Solution 94: s", "# Lab 94: s")
    lab = paths(tree)[1]
    nbformat.validate(nbformat.read(lab, as_version=4))
    assert labs.update(tree, write=True) == [] and "widgets" not in lab.read_text()
    assert [path.name for path in lab.parent.iterdir()] == [lab.name]


def test_only_the_score_has_an_output_and_it_is_what_the_unsolved_lab_prints(tree, checks, capsys):
    cells = [cell for cell in generated(tree).values() if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [None] * (len(cells) - 1) + [len(cells)]
    assert [cell["id"] for cell in cells if cell["outputs"]] == ["score"]
    [output] = cells[-1]["outputs"]
    assert "".join(output["text"]) == SCORE
    names = {"check": checks.lab}
    for cell in cells:
        if cell["id"] != "import":
            exec(compile(cell["source"].replace("%matplotlib inline", ""), "<cell 1>", "exec"), names)
    assert capsys.readouterr().out == "not attempted\n" * 2 + SCORE


def test_a_solution_that_would_make_a_bad_lab_names_its_cell(tree, checks):
    rows = [
        ("double", DOUBLE, "def double(x): return SECRET", "cell double"),
        ("double", "    ### END SOLUTION\n", "", "cell double"),
        ("class", "        ### BEGIN SOLUTION\n", "", "cell class"),
        ("import", "from", "## BEGIN SOLUTION\nSECRET = 1\n## END SOLUTION\nfrom", "cell import"),
        ("score", "check.score()", "print(1)", "check.score()"),
        ("head", "# Solution 94:", "# Solution 93:", "Solution 94:"),
    ]

    def generate(cell_id, old, new):
        changed(tree, cell_id, old, new)
        return labs.update(tree, write=True)

    assert_refused((functools.partial(generate, *row[:3]), ValueError, row[3]) for row in rows)
    assert not paths(tree)[1].exists()

    def render(content, name=NAME):
        return labs.render(write(tree, content, name))

    twice = notebook()
    twice["cells"][4]["id"] = "one"
    without_ids = notebook(nbformat_minor=4)
    for cell in without_ids["cells"]:
        del cell["id"]
    assert_refused(
        [
            (lambda: render(twice), ValueError, f"{NAME}.ipynb"),
            (lambda: render(without_ids), ValueError, f"{NAME}.ipynb"),
            (lambda: render(notebook(), "97_none"), ModuleNotFoundError, "lab97"),
            (lambda: render(notebook(), "94_other"), ValueError, "94_other"),
        ]
    )


def test_somebodys_work_is_not_overwritten(tree):
    generated(tree)
    changed(tree, "one", "Add.", "Multiply.")
    assert labs.update(tree, write=True)  # what we wrote ourselves is nobody's work
    lab = paths(tree)[1]
    work = json.loads(lab.read_text())
    work["cells"][1]["execution_count"] = 3
    lab.write_text(json.dumps(work))
    before = lab.read_bytes()
    with pytest.raises(FileExistsError):
        labs.update(tree, write=True)
    assert lab.read_bytes() == before and labs.update(tree, write=False) == [f"labs/{NAME}.ipynb"]


def test_the_command_says_which_labs_are_out_of_step(tree, capsys):
    def command(*arguments):
        status = in_step.run(functools.partial(labs.update, tree), "", arguments)
        return status, "".join(capsys.readouterr())

    status, said = command("--check")
    assert status == 1 and f"labs/{NAME}.ipynb" in said and not paths(tree)[1].exists()
    assert command()[0] == command()[0] == command("--check")[0] == 0
    changed(tree, "one", "Add.", "Multiply.")
    status, said = command("--check")
    assert status == 1 and NAME in said
    changed(tree, "score", "check.score()", "print(1)")
    assert command()[0] == 1


def test_this_repositorys_labs_are_in_step():
    assert labs.update(write=False) == []


def test_untouched_labs_start_no_ranks(monkeypatch):
    """Whoever runs a whole lab before writing anything waits for no launch."""
    monkeypatch.setattr(course_lib.launch, "warm", lambda: None)
    for module in (ranks, hangs):
        monkeypatch.setattr(module, "launch", lambda *given, **how: pytest.fail("an untouched stub was launched"))
    for path in sorted((labs.ROOT / "labs").glob("*.ipynb")):
        lab, names = labs.find_lab(path.stem), {"__name__": "__main__"}
        monkeypatch.setattr(lab, "verdicts", {})
        for cell in json.loads(path.read_text())["cells"]:
            source = "".join(cell["source"]).replace("warm_axolotl()", "")
            stubs_and_checks = (labs.STUB, " lab as check", "check.")
            if cell["cell_type"] == "code" and any(part in source for part in stubs_and_checks):
                exec(compile(source, "<cell 1>", "exec"), names)
        statuses = {name: verdict.status for name, verdict in lab.verdicts.items()}
        assert statuses == dict.fromkeys(lab.exercises, "not attempted"), path.name
