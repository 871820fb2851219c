"""Which files become which pages: copies for Sphinx to read, so that the notebooks stay where learners run them.

A page's place on the site is its place in the repository; what lies in site/ comes to the top.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import tomllib
from pathlib import Path

from links import Links
from notebook_page import page_of

from course_lib.figures.stored_figures import pictures
from course_lib.notebook.contents import map_rows
from course_lib.notebook.where_you_stand import cards

ROOT = Path(__file__).resolve().parent.parent
TASTE = "Llama-3.1-8B, one sequence of 2,048 tokens"  # how the landing page's figure begins its description


def repository() -> str:
    """The repository's address, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project["urls"]["Repository"].rstrip("/")


def pages() -> dict[str, str]:
    """Path in the repository -> path on the site, for every page."""
    folders = ("lessons", "labs", "lessons/deeper", "solutions")  # a lab comes before what goes deeper
    notebooks = [path.relative_to(ROOT).as_posix() for folder in folders for path in (ROOT / folder).glob("*.ipynb")]
    drawings = [path.relative_to(ROOT).as_posix() for path in (ROOT / "lessons" / "pictures").glob("*.svg")]
    own = [path.relative_to(ROOT).as_posix() for path in (ROOT / "site").rglob("*.md")]
    return {path: path for path in notebooks + drawings} | {path: path.removeprefix("site/") for path in own}


def gather(source: Path) -> None:
    """Write every page into the folder `source`, which is made anew."""
    shutil.rmtree(source, ignore_errors=True)
    links = Links(pages(), repository(), ROOT)
    for here, there in links.pages.items():
        target = source / there
        target.parent.mkdir(parents=True, exist_ok=True)
        if here.endswith(".ipynb"):
            notebook = page_of(json.loads((ROOT / here).read_text(encoding="utf-8")), here, links)
            target.write_text(json.dumps(notebook), encoding="utf-8")
        elif here.endswith(".svg"):
            shutil.copy(ROOT / here, target)
        else:
            target.write_text(links.rewrite((ROOT / here).read_text(encoding="utf-8"), here), encoding="utf-8")
    with (source / "instructors" / "index.md").open("a", encoding="utf-8") as page:
        page.write("\n```{toctree}\n:hidden:\n:glob:\n\n[0-9]*\n```\n")
    computed = {
        "REPOSITORY": links.address,
        "LESSON_CARDS": links.html(cards((row, "") for row in map_rows()), "lessons/00_start_here.ipynb", "index.md"),
        "TASTE": taste(),
    }
    index = (source / "index.md").read_text(encoding="utf-8")
    filled = re.sub("|".join(computed), lambda found: computed[found[0]], index)
    (source / "index.md").write_text(filled, encoding="utf-8")


def taste() -> str:
    """One figure of lesson 1, in HTML. Raises ValueError where lesson 1 has none that is described so."""
    notebook = json.loads((ROOT / "lessons" / "01_gpu_memory.ipynb").read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            for data, alt in pictures(output):
                if alt.startswith(TASTE):
                    return f'<img src="{data}" alt="{html.escape(alt)}">'
    raise ValueError(f'No figure of lesson 1 is described as "{TASTE} …"; name another one in site/gather.py (TASTE).')
