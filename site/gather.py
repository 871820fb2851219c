"""Which files become which pages: copies for Sphinx to read, so that the notebooks stay where learners run them.

A page's place on the site is its place in the repository; what lies in site/ comes to the top.
"""

from __future__ import annotations

import base64
import html
import json
import re
import shutil
import tomllib
from pathlib import Path

from links import Links
from notebook_page import page_of

from course_lib.figures.stored_figures import pictures

ROOT = Path(__file__).resolve().parent.parent
TASTE = "Llama-3.1-8B, one sequence of 2,048 tokens"  # how the landing page's figure begins its description


def repository() -> str:
    """The repository's address, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project["urls"]["Repository"].rstrip("/")


def pages() -> dict[str, str]:
    """Path in the repository -> path on the site, for every page."""
    notebooks = [path for folder in ("lessons", "labs", "solutions") for path in (ROOT / folder).glob("*.ipynb")]
    found = {path.relative_to(ROOT).as_posix(): path.relative_to(ROOT).as_posix() for path in notebooks}
    own = (ROOT / "site").rglob("*.md")
    return found | {path.relative_to(ROOT).as_posix(): path.relative_to(ROOT / "site").as_posix() for path in own}


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
        else:
            target.write_text(links.rewrite((ROOT / here).read_text(encoding="utf-8"), here), encoding="utf-8")
    # The README is no page of its own: pages include parts of it.
    readme = links.rewrite((ROOT / "README.md").read_text(encoding="utf-8"), "README.md", seen_from="README.md")
    (source / "README.md").write_text(readme, encoding="utf-8")
    instructors = source / "instructors" / "index.md"
    if instructors.exists():
        with instructors.open("a", encoding="utf-8") as page:
            page.write("\n```{toctree}\n:hidden:\n:glob:\n\n[0-9]*\n```\n")
    computed = {
        "REPOSITORY": links.address,
        "LESSON_CARDS": cards(),
        "TASTE": taste(source),
        "INSTRUCTOR_PAGES": "instructors/index" if instructors.exists() else "",
    }
    index = (source / "index.md").read_text(encoding="utf-8")
    filled = re.sub("|".join(computed), lambda found: computed[found[0]], index)
    (source / "index.md").write_text(filled, encoding="utf-8")


def map_rows() -> list[dict[str, str]]:
    """The rows of the course map's table: number, file, title, question, minutes, needs.

    Raises:
        ValueError: the map has no such table.
    """
    notebook = json.loads((ROOT / "lessons" / "00_start_here.ipynb").read_text(encoding="utf-8"))
    text = "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    row = re.compile(
        r"^\| (?P<number>\d) \| .*?\[(?P<title>[^\]]+)\]\((?P<file>0\d_\w+)\.ipynb\).*? \| (?P<question>[^|]+)"
        r" \| (?P<minutes>\d+)(?:, lab (?P<lab>\d+))?[^|]*\| (?P<needs>[^|]+) \|",
        re.MULTILINE,
    )
    rows = [found.groupdict() for found in row.finditer(text)]
    if len(rows) != len(list((ROOT / "lessons").glob("0[1-9]_*.ipynb"))):
        raise ValueError(
            f"The table of lessons/00_start_here.ipynb gives {len(rows)} lessons; give each lesson its row."
        )
    return rows


def cards() -> str:
    """The lessons as a list of cards, in HTML."""
    items = []
    for row in map_rows():
        told = {key: html.escape(value or "") for key, value in row.items()}
        lab = f'<a class="lab" href="labs/{told["file"]}.html">lab {told["number"]}, {told["lab"]} minutes</a>'
        items.append(
            f'<li><a class="lesson" href="lessons/{told["file"]}.html"><span class="number">{told["number"]}</span> '
            f'<span class="title">{told["title"]}</span></a><p class="question">{told["question"]}</p>'
            f'<p class="needs">{told["minutes"]} minutes · {told["needs"]}{" · " + lab if row["lab"] else ""}</p></li>'
        )
    return f'<ol class="lessons">{"".join(items)}</ol>'


def taste(source: Path) -> str:
    """One figure of lesson 1, as MyST; its picture is written beside the pages.

    Raises:
        ValueError: lesson 1 has no figure that is described so.
    """
    notebook = json.loads((ROOT / "lessons" / "01_gpu_memory.ipynb").read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            data, alt = next(iter(pictures(output)), ("", ""))
            if alt.startswith(TASTE):
                (source / "taste.png").write_bytes(base64.b64decode(data))
                return f"![{re.sub(r'([][])', '', alt)}](taste.png)"
    raise ValueError(f'No figure of lesson 1 is described as "{TASTE} …"; name another one in site/gather.py (TASTE).')
