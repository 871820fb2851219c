"""The link and the first cell that the single-GPU notebooks carry for Google Colab.

`python -m classroom.authoring.colab_cells` puts both into lessons/ and solutions/, with the repository's address from
pyproject.toml; `--check` names the notebooks that differ. The labs get theirs when they are generated from solutions/.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from classroom.authoring import in_step
from course_lib.files import write_atomically
from course_lib.notebook.contents import ROOT

NAMES = ("01_gpu_memory", "02_single_gpu")  # one GPU is enough for these
PATHS = [f"{folder}/{name}.ipynb" for folder in ("lessons", "solutions") for name in NAMES]
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
    """The course's address, from [project.urls] of pyproject.toml. Raises ValueError for one that Colab cannot open."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = project["urls"]["Repository"].removesuffix("/").removesuffix(".git")
    if not re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+", address):
        raise ValueError(f"Repository in pyproject.toml must be https://github.com/OWNER/NAME, not {address!r}")
    return address


def address_in_colab(address: str, path: str) -> str:
    """Where Colab opens the notebook at `path` ('lessons/01_gpu_memory.ipynb') of a repository."""
    return address.replace("https://github.com", "https://colab.research.google.com/github", 1) + f"/blob/main/{path}"


def place(notebook: Any, path: str, address: str) -> None:
    """Put the link below the title of a notebook that lies at `path`, and the cell behind it, in place of the old ones."""
    import nbformat

    notebook.cells = [cell for cell in notebook.cells if TAG not in cell.metadata.get("tags", [])]
    head = notebook.cells[0]
    title, _, rest = _LINK_LINE.sub("", head.source).partition("\n\n")
    head.source = f"{title}\n\n[Open in Colab]({address_in_colab(address, path)})\n\n{rest}".strip()
    folded = {"jupyter": {"source_hidden": True}, "cellView": "form"}  # in JupyterLab, in Colab
    source = _CELL.format(course=address, name=address.rsplit("/", 1)[1], path=path)
    notebook.cells.insert(1, nbformat.v4.new_code_cell(source, id=TAG, metadata={"tags": [TAG], **folded}))


def update(root: Path = ROOT, *, write: bool) -> list[str]:
    """Name the lessons and solutions whose link or cell is not in step; with `write`, write them."""
    import nbformat

    address, changed = repository(root), []
    for path in PATHS:
        notebook = nbformat.read(root / path, as_version=4)
        before = list(notebook.cells), notebook.cells[0].source
        place(notebook, path, address)
        if (notebook.cells, notebook.cells[0].source) != before:
            changed.append(path)
            if write:
                write_atomically(root / path, nbformat.writes(notebook) + "\n")
    return changed


if __name__ == "__main__":
    sys.exit(in_step.run(update, __doc__, sys.argv[1:]))
