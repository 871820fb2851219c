"""A notebook as a page to read: what only a kernel can use goes, what a reader needs comes."""

from __future__ import annotations

import copy
import re
from typing import Any

from links import Links

Notebook = dict[str, Any]
WIDGET = "application/vnd.jupyter.widget-view+json"
_MARKERS = re.compile(r"^ *### (?:BEGIN|END) SOLUTION *\n?", re.MULTILINE)


def page_of(notebook: Notebook, path: str, links: Links) -> Notebook:
    """The notebook that lies at `path` in the repository, as Sphinx is to see it; the one given stays as it is."""
    folder, *_, name = path.split("/")
    done = copy.deepcopy(notebook)
    done["cells"] = [cell for cell in done["cells"] if "colab" not in cell["metadata"].get("tags", ())]
    for cell in done["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            cell["source"] = links.rewrite(text, path)
        elif cell["cell_type"] == "code":
            cell["source"] = _MARKERS.sub("", text).rstrip("\n") if folder == "solutions" else text
            cell["outputs"] = [] if folder == "labs" else [_shown(output, path, links) for output in cell["outputs"]]
    done["cells"].insert(1, _markdown(_run_it(path, links), "run-it"))
    below = (f"labs/{name}", f"lessons/deeper/{name[:3]}")
    after = "".join(f"/{page}\n" for page in links.pages if path == f"lessons/{name}" and page.startswith(below))
    if after:  # its lab, and then what goes deeper, follow a lesson in the menu and by "Next"
        done["cells"].append(_markdown(f"```{{toctree}}\n:hidden:\n\n{after}```\n", "after-it"))
    if folder == "solutions":
        done["metadata"]["nosearch"] = True  # whoever searches shall not find the answers first
    return done


def _run_it(path: str, links: Links) -> str:
    doing = {
        "lessons": "You read what it printed on a CPU. Run it, and the numbers are yours:",
        "labs": "You read the exercises here; the checks answer in JupyterLab:",
        "solutions": "Run by the course's tests. To run it yourself:",
    }[path.split("/")[0]]
    return f"```{{container}} run-it\n{doing} `make lab`, then open [`{path}`]({links.blob(path)}).\n```\n"


def _shown(output: dict[str, Any], path: str, links: Links) -> dict[str, Any]:
    data = output.get("data", {})
    if WIDGET in data:
        del data[WIDGET]
        if "text/html" not in data:
            data["text/html"] = '<p class="needs-kernel">Menus and sliders move in a running notebook.</p>'
    page = links.html("".join(data.get("text/html", "")), path)
    if page.startswith("<details><summary>Source of") and "text/plain" in data:
        data["text/html"] = _folded_source(page, "".join(data["text/plain"]))
    elif page.startswith("<table"):
        data["text/html"] = f'<div class="table" tabindex="0" role="group" aria-label="table">{page}</div>'
    elif page:
        data["text/html"] = page
    return output


def _folded_source(page: str, source: str) -> str:
    """A program's source coloured by the theme's own colours, which differ on dark pages, instead of fixed ones."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    summary = re.match(r"<details>(<summary>.*?</summary>)", page, re.DOTALL)
    if not summary:
        return page
    code = highlight(source, PythonLexer(), HtmlFormatter()).replace("<pre>", '<pre tabindex="0">')
    return f'<details class="source">{summary[1]}{code}</details>'


def _markdown(text: str, id_: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "id": id_, "metadata": {}, "source": text}
