"""From a solution notebook to its lab: no answer left, everything else kept, the same bytes each time."""

import copy
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from classroom.authoring import labs
from course_checks.harness.checking import Lab

NAME = "94_small"
SCORE = "[ ] 1 Twice as much - not attempted\n[ ] 2 A word - not attempted\nLab 94: 0 of 2 passed\n"


@pytest.fixture(autouse=True)
def checks(monkeypatch):
    """course_checks.lab94 with two exercises."""
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
    if "course_checks" not in sys.modules:
        monkeypatch.setitem(sys.modules, "course_checks", types.ModuleType("course_checks"))
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
    markdown("head", "# Solution 94: small\n\nThe [lesson](../lessons/94_small.ipynb). # Solution 94: not this one"),
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
    cells = copy.deepcopy(CELLS)
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}, "widgets": {}}
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": metadata, "cells": cells} | changes


@pytest.fixture
def tree(tmp_path) -> Path:
    (tmp_path / "solutions").mkdir()
    (tmp_path / "labs").mkdir()
    write(tmp_path, notebook())
    return tmp_path


def write(tree: Path, content: dict, name: str = NAME) -> Path:
    path = tree / "solutions" / f"{name}.ipynb"
    path.write_text(json.dumps(content))
    return path


def changed(tree: Path, cell_id: str, old: str, new: str) -> Path:
    content = notebook()
    [cell] = [cell for cell in content["cells"] if cell["id"] == cell_id]
    source = "".join(cell["source"])
    assert old in source
    cell["source"] = source.replace(old, new)
    return write(tree, content)


def paths(tree: Path) -> tuple[Path, Path]:
    return tree / "solutions" / f"{NAME}.ipynb", tree / "labs" / f"{NAME}.ipynb"


def generated(tree: Path) -> dict[str, dict]:
    labs.generate(*paths(tree))
    cells = json.loads(paths(tree)[1].read_text())["cells"]
    return {cell["id"]: cell | {"source": "".join(cell["source"])} for cell in cells}


def test_the_lab_keeps_everything_but_the_answers(tree):
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


def test_the_title_changes_once_and_links_stay(tree):
    head = generated(tree)["head"]["source"]
    assert head == "# Lab 94: small\n\nThe [lesson](../lessons/94_small.ipynb). # Solution 94: not this one"


def test_what_stands_before_the_title_stays(tree):
    changed(tree, "head", "# Solution 94: small", "[badge](x)\n\n# Solution 94: small")
    assert generated(tree)["head"]["source"].startswith("[badge](x)\n\n# Lab 94: small\n")


def test_only_the_score_has_an_output_and_it_is_nothing_passed(tree):
    cells = [cell for cell in generated(tree).values() if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [None] * (len(cells) - 1) + [len(cells)]
    assert [cell["id"] for cell in cells if cell["outputs"]] == ["score"]
    [output] = cells[-1]["outputs"]
    assert "".join(output["text"]) == SCORE and output["name"] == "stdout"


def test_the_stored_score_is_what_the_lab_prints_unsolved(tree, checks, capsys, monkeypatch):
    monkeypatch.setenv("BEYOND_ONE_GPU_HOME", str(tree))
    names = {"check": checks.lab}
    for cell in generated(tree).values():
        if cell["cell_type"] == "code" and cell["id"] != "import":
            exec(compile(cell["source"].replace("%matplotlib inline", ""), "<cell 1>", "exec"), names)
    assert capsys.readouterr().out == "not attempted\n" * 2 + SCORE


def test_the_result_is_a_valid_notebook_and_the_same_each_time(tree):
    import nbformat

    generated(tree)
    lab = paths(tree)[1]
    nbformat.validate(nbformat.read(lab, as_version=4))
    before = lab.read_bytes()
    assert not labs.generate(*paths(tree)) and before.endswith(b"}\n") and b"widgets" not in before
    lab.unlink()
    assert labs.generate(*paths(tree)) and lab.read_bytes() == before
    assert [path.name for path in lab.parent.iterdir()] == [lab.name]


def test_out_of_sync_says_which_and_why(tree):
    assert labs.out_of_sync(tree) == [f"labs/{NAME}.ipynb: missing"]
    generated(tree)
    assert labs.out_of_sync(tree) == []
    changed(tree, "one", "Add.", "Multiply.")
    (tree / "labs" / "95_orphan.ipynb").write_text("{}")
    assert labs.out_of_sync(tree) == [
        f"labs/{NAME}.ipynb: differs from what solutions/{NAME}.ipynb gives",
        "labs/95_orphan.ipynb: has no solutions/95_orphan.ipynb",
    ]


@pytest.mark.parametrize(
    ("cell_id", "old", "new", "words"),
    [
        ("double", DOUBLE, "def double(x): return SECRET", r"cell 3 \(id double, .*tagged 'exercise'"),
        ("class", CLASS, "Word = 1", r"\(id check2.*check\.word"),
        ("double", "    ### END SOLUTION\n", "", r"\(id double.*has no '### END SOLUTION'"),
        ("double", "    ### BEGIN SOLUTION\n", "    # BEGIN SOLUTION\n", r"\(id double.*never began"),
        ("double", "    SECRET =", "    ### BEGIN SOLUTION\n    SECRET =", r"\(id double.*inside a solution"),
        ("import", "from", "## BEGIN SOLUTION\nSECRET = 1\n## END SOLUTION\nfrom", r"\(id import.*marker that is not"),
        ("check1", "check.double(", "check.duble(", r"\(id check1.*check\.duble, which 94_small does not define"),
        ("check1", "check.double(double)", "pass", r"never calls check\.double"),
        ("check1", "check.double(double)", "# check.double(double)", r"never calls check\.double"),
        ("score", "check.score()", "print(1)", r"last code cell .*must be check\.score\(\)"),
        ("class", "    def __init__(self):\n    ", "", r"\(id class.*would stop the lab at its stub"),
        ("double", "def double(x: int) -> int:", "if True:", r"\(id double.*would stop the lab at its stub"),
        ("class", "    kept", "      kept", r"\(id class.*is no Python once its solution is cleared"),
        ("head", "# Solution 94:", "# Solution 93:", r"must begin with '# Solution 94: '"),
        ("head", "# Solution 94:", "## Solution 94:", r"must begin with '# Solution 94: '"),
    ],
)
def test_a_solution_that_would_make_a_bad_lab_names_its_cell(tree, cell_id, old, new, words):
    with pytest.raises(ValueError, match=words):
        labs.generate(changed(tree, cell_id, old, new), paths(tree)[1])
    assert not paths(tree)[1].exists()


def test_cell_ids_must_be_there_and_differ(tree):
    content = notebook()
    content["cells"][4]["id"] = "one"
    with pytest.raises(ValueError, match="cell 4: the cell id is used twice"):
        labs.render(write(tree, content))
    del content["cells"][4]["id"]
    with pytest.raises(ValueError, match="cell 4: the cell id is missing"):
        labs.render(write(tree, content))
    with pytest.raises(ValueError, match="old notebook format"):
        labs.render(write(tree, notebook(nbformat_minor=4)))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"nbformat": 4}', "null"])
def test_what_is_no_notebook(tree, text):
    paths(tree)[0].write_text(text)
    with pytest.raises(ValueError, match="94_small.ipynb is not a notebook"):
        labs.render(paths(tree)[0])


def test_the_check_module_must_be_there_and_match(tree, checks):
    with pytest.raises(ValueError, match="write course_checks/lab97.py"):
        labs.render(write(tree, notebook(), "97_none"))
    with pytest.raises(ValueError, match="named like"):
        labs.render(write(tree, notebook(), "none"))
    with pytest.raises(ValueError, match=r'lab94 must define lab = Lab\("94_other"'):
        labs.render(write(tree, notebook(), "94_other"))
    del checks.lab
    with pytest.raises(ValueError, match=r'lab94 must define lab = Lab\("94_small"'):
        labs.render(paths(tree)[0])


def test_somebodys_work_is_not_overwritten(tree):
    generated(tree)
    changed(tree, "one", "Add.", "Multiply.")
    assert labs.generate(*paths(tree))  # what we wrote ourselves is nobody's work
    lab = paths(tree)[1]
    work = json.loads(lab.read_text())
    work["cells"][1]["execution_count"] = 3
    lab.write_text(json.dumps(work))
    before = lab.read_bytes()
    with pytest.raises(FileExistsError, match="--force"):
        labs.generate(*paths(tree))
    assert lab.read_bytes() == before
    assert labs.generate(*paths(tree), force=True) and lab.read_bytes() != before


def test_the_command_line(tree, capsys):
    assert labs.main(["--check", "--root", str(tree)]) == 1
    assert capsys.readouterr().out == f"labs/{NAME}.ipynb: missing\n" and not paths(tree)[1].exists()
    assert labs.main(["--root", str(tree)]) == 0
    assert labs.main(["--root", str(tree)]) == 0
    assert capsys.readouterr().out == f"labs/{NAME}.ipynb: written\nlabs/{NAME}.ipynb: in step\n"
    assert labs.main(["--check", "--root", str(tree)]) == 0
    assert capsys.readouterr().out == "labs/ is in step with solutions/\n"
    changed(tree, "score", "check.score()", "print(1)")
    assert labs.main(["--root", str(tree)]) == labs.main(["--check", "--root", str(tree)]) == 1
    said = capsys.readouterr()
    assert "check.score()" in said.err and "check.score()" in said.out


def test_the_module_runs_as_a_program_on_an_empty_tree(tmp_path):
    command = [sys.executable, "-m", "classroom.authoring.labs", "--root", str(tmp_path), "--check"]
    done = subprocess.run(command, cwd=labs.ROOT, env={**os.environ, "PYTHONPATH": "."}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "labs/ is in step with solutions/\n")


def test_importing_the_generator_does_not_pay_for_nbgrader():
    code = "import sys, classroom.authoring.labs; sys.exit('nbgrader' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=labs.ROOT).returncode == 0


def test_this_repositorys_labs_are_in_step(monkeypatch):
    monkeypatch.undo()  # the real checks
    assert labs.out_of_sync() == []
