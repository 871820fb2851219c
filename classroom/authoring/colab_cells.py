"""The link and the first cell that the single-GPU notebooks carry for Google Colab.

`python -m classroom.authoring.colab_cells --write` puts both into lessons/ and solutions/, with the repository's address from
pyproject.toml; `--check` says what is missing or differs. The labs get theirs when they are generated from solutions/.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from course_lib.files import write_atomically

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("01_gpu_memory", "02_single_gpu")  # one GPU is enough for these
FOLDERS = ("lessons", "labs", "solutions")
BRANCH = "main"
TAG = "colab"  # of the cell, which has it as its id, too
_LINK_LINE = re.compile(r"^\[Open in Colab\].*\n*", re.MULTILINE)

# `{course}` is an address, `{name}` its last part. Outside Colab nothing of it runs, and nothing is printed.
_CELL = """\
# For Google Colab: fetch the course, install what is missing there
import os

if "COLAB_RELEASE_TAG" in os.environ:
    course = "{course}"
    if not os.path.isdir("../course_lib") and not os.path.isdir("{name}"):
        if os.system(f"git clone -q --depth 1 {{course}}"):
            raise ConnectionError(f"{{course}} cannot be fetched: is there a network? Then run this cell again.")
    os.chdir(".." if os.path.isdir("../course_lib") else "{name}")
    from course_lib.colab import prepare

    prepare("{path}")"""


def repository(root: Path = ROOT) -> str:
    """The course's address: [project.urls] Repository of pyproject.toml, or of the installed package without one.

    Raises ValueError where neither names an address on GitHub, the only place that Colab opens notebooks from.
    """
    file = root / "pyproject.toml"
    if file.is_file():
        urls = tomllib.loads(file.read_text(encoding="utf-8"))["project"].get("urls", {})
    else:
        lines = importlib.metadata.metadata("beyond-one-gpu").get_all("Project-URL", [])
        urls = dict(line.split(", ", 1) for line in lines)
    address = urls.get("Repository", "").removesuffix("/").removesuffix(".git")
    if not re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+", address):
        raise ValueError(
            f"[project.urls] Repository must be https://github.com/OWNER/NAME, not {address!r}: Colab opens only those."
        )
    return address


def address_in_colab(address: str, path: str) -> str:
    """Where Colab opens the notebook at `path` ('lessons/01_gpu_memory.ipynb') of a repository."""
    opens = address.replace("https://", "https://colab.research.google.com/") + f"/blob/{BRANCH}/{path}"
    return opens.replace("github.com/", "github/", 1)


def first_cell(address: str, path: str) -> str:
    """The source of the cell that makes a Colab runtime ready for the notebook at `path`."""
    return _CELL.format(course=address, name=address.rsplit("/", 1)[1], path=path)


def place(notebook: Any, path: str, address: str | None = None) -> None:
    """Put link and cell into a notebook (as nbformat reads it) that lies at `path`, in place of those it has.

    The link stands below the title, the cell behind the title's. Raises ValueError for a notebook without a title.
    """
    import nbformat

    address = address or repository()
    notebook.cells = [cell for cell in notebook.cells if TAG not in cell.metadata.get("tags", [])]
    head = notebook.cells[0] if notebook.cells else None
    title, _, rest = _LINK_LINE.sub("", head.source).partition("\n\n") if head else ("", "", "")
    if not title.startswith("# ") or head.cell_type != "markdown":
        raise ValueError(f"{path} must begin with a cell of Markdown whose first line is its title, '# …'")
    head.source = "\n\n".join(
        part for part in (title, f"[Open in Colab]({address_in_colab(address, path)})", rest) if part
    )
    folded = {"jupyter": {"source_hidden": True}, "cellView": "form"}  # in JupyterLab, in Colab
    cell = nbformat.v4.new_code_cell(first_cell(address, path), id=TAG, metadata={"tags": [TAG], **folded})
    notebook.cells.insert(1, cell)


def with_both(text: str, path: str, address: str | None = None) -> str:
    """A notebook file's text as it should be at `path`; everything but link and cell stays, outputs too."""
    import nbformat

    notebook = nbformat.reads(text, as_version=4)
    place(notebook, path, address)
    return nbformat.writes(notebook) + "\n"


def differing(root: Path = ROOT) -> list[str]:
    """The notebooks under `root` whose link or cell is missing or not what it should be, as 'lessons/NAME.ipynb'."""
    address = repository(root)
    paths = [f"{folder}/{name}.ipynb" for folder in FOLDERS for name in NAMES]
    return [
        path
        for path in paths
        if not (root / path).is_file()
        or _cells(text := (root / path).read_text(encoding="utf-8")) != _cells(with_both(text, path, address))
    ]


def write(root: Path = ROOT) -> list[str]:
    """Put link and cell into the lessons and solutions under `root` that differ; their paths come back."""
    address, written = repository(root), []
    for path in differing(root):
        if path.startswith("labs/"):
            continue
        file = root / path
        text = with_both(file.read_text(encoding="utf-8"), path, address)
        write_atomically(file, text)
        written.append(path)
    return written


def _cells(text: str) -> Any:
    return json.loads(text)["cells"]


def main(arguments: list[str] | None = None) -> int:
    """The command line: 0 when link and cell are in place, 1 when they are not, 2 when they cannot be."""
    parser = argparse.ArgumentParser(
        prog="python -m classroom.authoring.colab_cells",
        description="Link and first cell for Google Colab in the notebooks.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help="put them into lessons/ and solutions/")
    what.add_argument("--check", action="store_true", help="write nothing; say which notebooks differ")
    parser.add_argument(
        "--root", type=Path, default=ROOT, help="the folder that holds pyproject.toml and the notebooks"
    )
    options = parser.parse_args(arguments)
    try:
        for path in write(options.root) if options.write else ():
            print(f"{path}: written")
        left = differing(options.root)
    except (OSError, ValueError) as error:
        print(error)
        return 2
    for path in left:
        mend = (
            "python -m classroom.authoring.labs"
            if path.startswith("labs/")
            else "python -m classroom.authoring.colab_cells --write"
        )
        print(f"{path}: link or cell for Colab differs: {mend}")
    if not left:
        print("Colab's link and cell are in place")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
