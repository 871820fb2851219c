"""``beyond class slides 3``: a lesson as nbconvert's slides. A cell's outputs, and what follows a question, wait for a key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from classroom.authoring import plans
from course_lib.files import write_atomically
from course_lib.notebook import contents
from course_tools.command_line import ArgumentParser, reports_errors

REVEAL, LOCAL = "reveal.js@5", "node_modules/reveal.js"  # the second is where npm puts it
# nbconvert's page without what it fetches besides reveal.js: formulas are MathML, and of a widget its picture is shown.
TEMPLATE = """\
{%- extends 'reveal/index.html.j2' -%}
{%- block html_head_js -%}{%- endblock -%}{%- block html_head_js_mathjax -%}{%- endblock -%}
{%- block data_widget_view -%}{{ output.data["text/html"] }}{%- endblock -%}
{%- block html_head_css -%}
<style>
.reveal .slides { text-align: left }
.reveal .slides section section { max-height: 700px; overflow: auto }
.reveal .jp-CodeCell pre { white-space: pre-wrap; font-size: 17px }
.reveal .jp-OutputArea img { max-height: 500px; width: auto }
</style>
{%- endblock -%}
{%- block footer_js -%}
<script src="{{ resources.reveal.url_prefix }}/dist/reveal.js"></script>
<script src="{{ resources.reveal.url_prefix }}/plugin/notes/notes.js"></script>
<script>
Reveal.initialize({width: 1280, height: 720, center: false, hash: true, slideNumber: "c/t", plugins: [RevealNotes]});
Reveal.on("fragmentshown", shown => shown.fragment.scrollIntoView({block: "nearest"}));
</script>{%- endblock -%}
"""


def slide_cells(notebook: Any, note: str) -> Iterator[Any]:
    """A lesson's cells with their slide types; parts of `note` under one of its headings become speaker notes."""
    from nbformat.v4 import new_code_cell, new_markdown_cell

    def heading(part: str) -> str:
        return part.partition("\n")[0].strip("# ")

    # what stands below the note's own title is for the lesson's first slide
    note = heading(notebook.cells[0].source) + "\n" + note.partition("\n")[2]
    spoken = {heading(part): part.partition("\n")[2] for part in contents.headed_parts(note)}
    for cell in notebook.cells:
        if "colab" in cell.metadata.get("tags", ()):
            continue
        if cell.cell_type == "code":
            yield new_code_cell(cell.source, metadata={"slideshow": {"slide_type": "subslide"}})
            if cell.outputs:
                shown = {"slideshow": {"slide_type": "fragment"}, "transient": {"remove_source": True}}
                yield new_code_cell(outputs=cell.outputs, metadata=shown)
            continue
        for part in contents.headed_parts(cell.source):
            begins = "slide" if re.match("##? ", part) else "subslide"
            asked = re.search(r"^[^|\n]*\*\*[^*|]+\?\*\*\.?", part, re.MULTILINE)  # in bold: say your answer first
            cut = asked.end() if asked else len(part)
            types = {begins: part[:cut], "notes": spoken.get(heading(part), ""), "fragment": part[cut:]}
            for slide_type, text in types.items():
                if text.strip():
                    yield new_markdown_cell(for_slides(text), metadata={"slideshow": {"slide_type": slide_type}})


def for_slides(source: str) -> str:
    """Without the link into Colab and links that lead nowhere from another folder, and with formulas that need no script."""
    from docutils.utils.math.latex2mathml import tex2mathml

    source = re.sub(r"\n---\n+[^\n]*00_start_here\.ipynb[^\n]*\s*\Z", "\n", source)  # the neighbours, at the end
    source = re.sub(r"\[Open in Colab\]\([^)]*\)", "", source)
    source = re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?://)[^)\s]*\)", r"\1", source)
    code_or_formula = re.compile(r"(```.*?```|`[^`\n]*`)|\$?\$(.+?)\$\$?", re.DOTALL)
    return code_or_formula.sub(lambda found: found[1] or tex2mathml(found[2]), source)


def make(lesson: Path, folder: Path, note: str) -> Path:
    """Write the slides of the notebook `lesson` into `folder`, with parts of an instructor's `note` as speaker notes."""
    import nbformat
    from nbconvert import SlidesExporter

    notebook = nbformat.read(lesson, as_version=4)
    notebook.cells = list(slide_cells(notebook, note))
    # nbconvert's usual theme fetches its fonts
    exporter = SlidesExporter(raw_template=TEMPLATE, reveal_theme="white", embed_images=True)
    exporter.exclude_input_prompt = exporter.exclude_output_prompt = True
    exporter.reveal_url_prefix = LOCAL if (folder / LOCAL).is_dir() else f"https://unpkg.com/{REVEAL}"
    page, _ = exporter.from_notebook_node(notebook, {"metadata": {"name": lesson.stem, "path": str(lesson.parent)}})
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"{lesson.stem}.html", page)
    return folder / f"{lesson.stem}.html"


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Make the slides; returns 0, or 2 for bad input."""
    parser = ArgumentParser(prog="beyond class slides", description="A lesson as reveal.js slides.")
    numbers = [row.number for row in contents.map_rows()]
    parser.add_argument("lesson", choices=[*map(str, numbers), "all"], help="a lesson's number, or all")
    parser.add_argument("--out", type=Path, default=contents.ROOT / "build/slides", help="the folder to write into")
    options = parser.parse_args(argv)
    for number in numbers if options.lesson == "all" else [int(options.lesson)]:
        print(make(contents.find(number, "lessons"), options.out, plans.note(number).text), flush=True)
    if not (options.out / LOCAL).is_dir():
        print(f"Showing them needs a network, unless you first:  npm install --prefix {options.out} {REVEAL}")
    print("space: on · s: a window with the notes · f: full screen · ?print-pdf behind the address: for paper")
    return 0
