"""labs/*.ipynb from solutions/*.ipynb: the answers cleared, everything else kept, the closing score filled in.

`python -m classroom.authoring.labs` writes the labs that changed, `--check` only says which ones would. A lab in which somebody
has run cells is their work: it stays unless `--force` is given.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from classroom.authoring import colab_cells as colab
from course_checks.harness.checking import Lab
from course_lib.files import write_atomically
from course_lib.notebook.contents import ROOT

STUB = "raise NotImplementedError  # your code here"
TEXT_STUB = "*Your answer here.*"
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
_CALL = re.compile(r"^[^#\n]*\bcheck\.(\w+)\(", re.MULTILINE)


def generate(solution_path: str | Path, lab_path: str | Path, *, force: bool = False) -> bool:
    """Write the lab of one solution notebook; True when the file changed.

    Raises ValueError for a notebook that cannot become a lab (it names the cell), and FileExistsError where the lab
    there holds somebody's executed cells and `force` is not given.
    """
    lab_path = Path(lab_path)
    text = render(solution_path)
    if lab_path.exists():
        if _read(lab_path) == text:
            return False
        if not force and _worked_in(lab_path):
            raise FileExistsError(f"{lab_path} has executed cells, somebody's work: copy it away, or use --force")
    write_atomically(lab_path, text)
    return True


def out_of_sync(folder: str | Path = ROOT) -> list[str]:
    """The labs under `folder` that are not what its solutions give, each as 'labs/NAME.ipynb: why'."""
    folder = Path(folder)
    solutions = {path.name: path for path in sorted((folder / "solutions").glob("*.ipynb"))}
    problems = []
    for name, path in solutions.items():
        lab = folder / "labs" / name
        if not lab.exists():
            problems.append(f"labs/{name}: missing")
        elif _read(lab) != render(path):
            problems.append(f"labs/{name}: differs from what solutions/{name} gives")
    orphans = [path.name for path in sorted((folder / "labs").glob("*.ipynb")) if path.name not in solutions]
    return problems + [f"labs/{name}: has no solutions/{name}" for name in orphans]


def render(solution_path: str | Path) -> str:
    """The text of the lab notebook; the same solution always gives the same bytes. Raises ValueError as `generate`."""
    import nbformat

    path = Path(solution_path)
    lab = find_lab(path.stem)
    text = _read(path)
    _check_ids(text, path)
    notebook = nbformat.reads(text, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if "solution-only" not in cell.metadata.get("tags", [])]
    for number, cell in enumerate(notebook.cells):
        _check_regions(cell, _name(path, number, cell))
    _check_exercises(notebook.cells, lab, path)
    _clear(notebook)
    for number, cell in enumerate(notebook.cells):
        _check_cleared(cell, _name(path, number, cell))
    _retitle(notebook.cells, lab, path)
    if path.stem in colab.NAMES:
        colab.place(notebook, f"labs/{path.name}")
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of the run that made the solution's outputs
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    score = code[-1]
    score.execution_count = len(code)  # nbval takes an output only from a cell that was run
    score.outputs = [nbformat.v4.new_output("stream", name="stdout", text=lab.score_text({}) + "\n")]
    kept = ("kernelspec", "language_info")
    notebook.metadata = nbformat.from_dict({key: notebook.metadata[key] for key in kept if key in notebook.metadata})
    try:
        nbformat.validate(notebook)
    except nbformat.ValidationError as error:
        raise ValueError(f"{path.name} is not a valid notebook: {error.message}") from error
    return nbformat.writes(notebook) + "\n"


def find_lab(name: str) -> Lab:
    """The `Lab` of a notebook name: '04_ddp_accelerate' -> course_checks.lab04.lab. Raises ValueError if none."""
    number = re.match(r"(\d\d)_", name)
    if not number:
        raise ValueError(f"a lab's notebook is named like '04_ddp_accelerate.ipynb', not {name!r}")
    module_name = f"course_checks.lab{number[1]}"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name not in (module_name, "course_checks"):
            raise
        raise ValueError(f"{name} needs its checks: write {module_name.replace('.', '/')}.py") from error
    lab = getattr(module, "lab", None)
    if not isinstance(lab, Lab) or lab.name != name:
        raise ValueError(f'{module_name} must define lab = Lab("{name}", title=…)')
    return lab


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _name(path: Path, number: int, cell: Any) -> str:
    first = next((line.strip() for line in cell.source.splitlines() if line.strip()), "empty")
    return f"{path.name}, cell {number} (id {cell.id}, {first[:50]!r})"


def _check_ids(text: str, path: Path) -> None:
    """Without ids of its own, a notebook gets random ones on reading, and its lab would differ each time."""
    try:
        raw = json.loads(text)
        version = raw["nbformat"], raw["nbformat_minor"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path.name} is not a notebook: {error!r}") from error
    if version < (4, 5):
        raise ValueError(f"{path.name} is in an old notebook format: save it as 4.5, with cell ids")
    ids = [cell.get("id") for cell in raw["cells"]]
    for number, cell_id in enumerate(ids):
        if cell_id is None or cell_id in ids[:number]:
            raise ValueError(
                f"{path.name}, cell {number}: the cell id is {'missing' if cell_id is None else 'used twice'}"
            )


def _check_regions(cell: Any, name: str) -> None:
    inside = False
    for line in cell.source.splitlines():
        if BEGIN in line and inside:
            raise ValueError(f"{name} begins a solution inside a solution")
        if END in line and not inside:
            raise ValueError(f"{name} ends a solution that never began")
        inside = (inside or BEGIN in line) and END not in line
    if inside:
        raise ValueError(f"{name} has no {END!r}")


def _check_cleared(cell: Any, name: str) -> None:
    """No marker is left, and no stub that would stop the lab before anybody calls it."""
    from IPython.core.inputtransformer2 import TransformerManager

    if "BEGIN SOLUTION" in cell.source or "END SOLUTION" in cell.source:
        raise ValueError(f"{name} has a solution marker that is not {BEGIN!r} or {END!r}")
    if cell.cell_type == "code" and STUB in cell.source:
        try:
            tree = ast.parse(TransformerManager().transform_cell(cell.source))  # the cell may hold %magics
        except SyntaxError as error:
            raise ValueError(f"{name} is no Python once its solution is cleared: {error}") from error
        waiting: list[ast.AST] = [tree]
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.Raise):
                raise ValueError(f"{name} would stop the lab at its stub: put the solution inside a function")
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                waiting.extend(ast.iter_child_nodes(node))


def _check_exercises(cells: list[Any], lab: Lab, path: Path) -> None:
    """Every exercise is checked in the notebook, behind a cell to solve; the last code cell prints the score."""
    called: set[str] = set()
    regions = 0  # cells to solve since the check before
    code = [(number, cell) for number, cell in enumerate(cells) if cell.cell_type == "code"]
    for number, cell in code:
        name = _name(path, number, cell)
        has_region = BEGIN in cell.source
        regions += has_region
        if "exercise" in cell.metadata.get("tags", []) and not has_region:
            raise ValueError(f"{name} is tagged 'exercise' and has no {BEGIN!r} … {END!r}")
        calls = set(_CALL.findall(cell.source)) - {"score"}
        for exercise in sorted(calls - set(lab.exercises)):
            raise ValueError(f"{name} calls check.{exercise}, which {lab.name} does not define")
        new = calls - called
        if new and not regions:
            raise ValueError(f"{name} calls check.{min(new)}, and no cell before it has a {BEGIN!r} … {END!r}")
        if calls:
            regions = 0
        called |= calls
    missing = [exercise for exercise in lab.exercises if exercise not in called]
    if missing:
        raise ValueError(f"{path.name} never calls check.{missing[0]}(…): nobody could pass that exercise")
    if not code or not re.search(r"^check\.score\(\)", code[-1][1].source, re.MULTILINE):
        raise ValueError(f"the last code cell of {path.name} must be check.score()")


def _clear(notebook: Any) -> None:
    # Imported here: nbgrader takes seconds, and most who import this module do not clear anything.
    from nbgrader.preprocessors import ClearSolutions

    clear = ClearSolutions(
        code_stub={"python": STUB},
        text_stub=TEXT_STUB,
        begin_solution_delimeter=BEGIN,
        end_solution_delimeter=END,
        enforce_metadata=False,
    )
    clear.preprocess(notebook, {})


def _retitle(cells: list[Any], lab: Lab, path: Path) -> None:
    """The notebook's first heading, '# Solution 4: …', becomes '# Lab 4: …'."""
    for cell in cells:
        if cell.cell_type == "markdown" and (heading := re.search(r"^#+ .*$", cell.source, re.MULTILINE)):
            wanted = f"# Solution {lab.number}: "
            if not heading[0].startswith(wanted):
                raise ValueError(f"the first heading of {path.name} must begin with {wanted!r}, not {heading[0]!r}")
            cell.source = cell.source.replace(wanted, f"# Lab {lab.number}: ", 1)
            return
    raise ValueError(f"{path.name} has no heading '# Solution {lab.number}: …'")


def _worked_in(path: Path) -> bool:
    """True when a cell was executed: in what we generate only the last code cell, the score, has an execution count."""
    try:
        code = [cell for cell in json.loads(_read(path))["cells"] if cell["cell_type"] == "code"]
        return any(cell.get("execution_count") is not None for cell in code[:-1])
    except (ValueError, KeyError, TypeError, AttributeError):
        return False  # not a notebook any more: nothing to keep


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit status is 1 when a lab is out of step or was left alone, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m classroom.authoring.labs", description="Generate labs/ from solutions/."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; say which labs are not in step")
    parser.add_argument("--force", action="store_true", help="overwrite labs in which somebody has run cells")
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder that holds solutions/ and labs/")
    options = parser.parse_args(arguments)
    if options.check:
        try:
            problems = out_of_sync(options.root)
        except ValueError as error:
            problems = [str(error)]
        print("\n".join(problems) or "labs/ is in step with solutions/")
        return 1 if problems else 0
    status = 0
    (options.root / "labs").mkdir(exist_ok=True)
    for solution in sorted((options.root / "solutions").glob("*.ipynb")):
        try:
            changed = generate(solution, options.root / "labs" / solution.name, force=options.force)
            print(f"labs/{solution.name}: {'written' if changed else 'in step'}")
        except (ValueError, FileExistsError) as error:
            print(error, file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
