"""labs/*.ipynb from solutions/*.ipynb: the answers cleared, everything else kept, the closing score filled in.

`python -m classroom.authoring.labs` writes the labs that changed, `--check` only names them. A lab in which somebody has
run cells is their work, and stays: `beyond class reset` keeps a copy of it.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from classroom.authoring import colab_cells, in_step
from course_checks.harness.checking import Lab
from course_lib.files import write_atomically
from course_lib.notebook.contents import ROOT

STUB = "raise NotImplementedError  # your code here"
TEXT_STUB = "*Your answer here.*"
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"


def update(root: Path = ROOT, *, write: bool) -> list[str]:
    """Name the labs that are not what their solutions give; with `write`, write them.

    Raises ValueError for a solution that cannot become a lab, and FileExistsError where a lab holds executed cells:
    then nothing is written.
    """
    changed = {}
    for solution in sorted((root / "solutions").glob("*.ipynb")):
        lab, text = root / "labs" / solution.name, render(solution)
        if not lab.exists() or lab.read_text(encoding="utf-8") != text:
            changed[lab] = text
            if write and lab.exists() and _worked_in(lab):
                raise FileExistsError(f"{lab} has executed cells, somebody's work: beyond class reset keeps a copy")
    for lab, text in changed.items() if write else ():
        lab.parent.mkdir(exist_ok=True)
        write_atomically(lab, text)
    return [f"labs/{lab.name}" for lab in changed]


def render(solution: Path) -> str:
    """The text of the lab notebook; the same solution always gives the same bytes. Raises ValueError as `update`."""
    import nbformat

    lab, text = find_lab(solution.stem), solution.read_text(encoding="utf-8")
    ids = [cell.get("id") for cell in json.loads(text)["cells"]]
    if None in ids or len(set(ids)) < len(ids):  # on reading, nbformat would give it another one each time
        raise ValueError(f"{solution.name}: each cell needs an id of its own, as notebook format 4.5 has it")
    notebook = nbformat.reads(text, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if "solution-only" not in cell.metadata.get("tags", [])]
    _clear(notebook, solution.name)
    head, title = notebook.cells[0], f"# Solution {lab.number}: "
    if title not in head.source:
        raise ValueError(f"the title of {solution.name} must begin with {title!r}")
    head.source = head.source.replace(title, f"# Lab {lab.number}: ", 1)
    if solution.stem in colab_cells.NAMES:
        colab_cells.place(notebook, f"labs/{solution.name}", colab_cells.repository())
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of the run that made the solution's outputs
    for cell in code:
        cell.outputs, cell.execution_count = [], None
    score = code[-1]
    if not score.source.startswith("check.score()"):
        raise ValueError(f"the last code cell of {solution.name} must be check.score()")
    score.execution_count = len(code)  # nbval takes an output only from a cell that was run
    score.outputs = [nbformat.v4.new_output("stream", name="stdout", text=lab.score_text({}) + "\n")]
    kept = ("kernelspec", "language_info")
    notebook.metadata = nbformat.from_dict({key: notebook.metadata[key] for key in kept if key in notebook.metadata})
    return nbformat.writes(notebook) + "\n"


def find_lab(name: str) -> Lab:
    """The `Lab` of a notebook's name: '04_ddp_accelerate' -> course_checks.lab04.lab."""
    lab = importlib.import_module(f"course_checks.lab{name[:2]}").lab
    if lab.name != name:
        raise ValueError(f"course_checks.lab{name[:2]} has the checks of {lab.name}, not of {name}")
    return lab


def _clear(notebook: Any, name: str) -> None:
    """Put stubs in place of the solutions. Raises ValueError where one would be left in the lab."""
    # Imported here: nbgrader takes seconds, and most who import this module do not clear anything.
    from nbgrader.preprocessors import ClearSolutions

    for cell in notebook.cells:
        marks = [mark for line in cell.source.splitlines() for mark in (BEGIN, END) if mark in line]
        if marks != [BEGIN, END] * (len(marks) // 2):
            raise ValueError(f"{name}, cell {cell.id}: each {BEGIN!r} needs its {END!r} behind it")
        if "exercise" in cell.metadata.get("tags", []) and not marks:
            raise ValueError(f"{name}, cell {cell.id} is tagged 'exercise' and has no {BEGIN!r}")
    clear = ClearSolutions(
        code_stub={"python": STUB},
        text_stub=TEXT_STUB,
        begin_solution_delimeter=BEGIN,
        end_solution_delimeter=END,
        enforce_metadata=False,
    )
    clear.preprocess(notebook, {})
    for cell in notebook.cells:
        if re.search("(BEGIN|END) SOLUTION", cell.source):
            raise ValueError(f"{name}, cell {cell.id} has a marker that is not {BEGIN!r} or {END!r}")


def _worked_in(lab: Path) -> bool:
    """True when a cell was executed: in what we generate only the last code cell, the score, has an execution count."""
    code = [cell for cell in json.loads(lab.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    return any(cell.get("execution_count") is not None for cell in code[:-1])


if __name__ == "__main__":
    sys.exit(in_step.run(update, __doc__, sys.argv[1:]))
