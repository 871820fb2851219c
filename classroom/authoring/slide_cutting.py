"""A lesson's notebook cut into slides: headings begin one, a question ends one, and no slide holds more than fits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from classroom.authoring.slide_blocks import FOLD_LINES, Block, code_block, output_block, text_blocks

ROOM = 590  # px below the heading of a slide of 1280 x 720


@dataclass
class Slide:
    """`heading` is the exact `##` heading that it stands under; `part` the `###` heading, if any; `first` of its section."""

    heading: str
    part: str = ""
    level: int = 2
    first: bool = True
    blocks: list[Block] = field(default_factory=list)

    @property
    def height(self) -> int:
        """Estimated px of what is on it."""
        return sum(block.height for block in self.blocks)


def cut(notebook: Any) -> list[Slide]:
    """The slides of a lesson, in order. Left out are the cell for Colab and the links at the end, and nothing else."""
    slides: list[Slide] = []
    for piece in _stream(notebook):
        if isinstance(piece, Slide):
            slides.append(piece)
            continue
        if not slides:
            slides.append(Slide("", level=1))
        last = slides[-1]
        if last.blocks and (last.blocks[-1].asks or last.height + piece.height > ROOM):
            last = Slide(last.heading, last.part, last.level, first=False)
            slides.append(last)
        last.blocks.append(piece)
    return slides


def _stream(notebook: Any) -> Iterator[Slide | Block]:
    """Headings as empty slides, and the blocks between them."""
    heading, level = "", 1
    for cell in notebook.cells:
        if "colab" in cell.metadata.get("tags", ()):
            continue
        if cell.cell_type == "code":
            yield from _of_code(cell)
        elif cell.cell_type == "markdown":
            for kind, text in _headed(_without_links(cell.source)):
                if kind == 0:
                    yield from text_blocks(text)
                    continue
                if kind < 3:
                    heading, level = text, kind
                yield Slide(heading, text if kind > 2 else "", level, first=kind < 3)


def _without_links(source: str) -> str:
    """Without the rule and the links to the neighbours with which a lesson ends."""
    return re.sub(r"\n---\n+[^\n]*00_start_here\.ipynb[^\n]*\s*\Z", "\n", source)


def _headed(source: str) -> Iterator[tuple[int, str]]:
    """(level, text) of each heading, and (0, text) of what lies between; a # inside a fence is no heading."""
    kept: list[str] = []
    fenced = False
    for line in source.splitlines():
        fenced ^= line.lstrip().startswith("```")
        if not fenced and (found := re.match(r"(#{1,6}) +(.+?)\s*$", line)):
            if "\n".join(kept).strip():
                yield 0, "\n".join(kept)
            kept = []
            yield len(found[1]), found[2]
        else:
            kept.append(line)
    if "\n".join(kept).strip():
        yield 0, "\n".join(kept)


def _of_code(cell: Any) -> Iterator[Block]:
    outputs = _gathered(cell.get("outputs", []))
    shown = [block for output in outputs if (block := output_block(output))]
    drawn = any("text/html" in output.get("data", {}) for output in outputs)
    imports = all(re.match(r"(import|from) |[ )]|$|#", line) for line in cell.source.splitlines()[:6])
    code = code_block(cell.source, folded=False)
    long = cell.source.count("\n") + 1 > FOLD_LINES
    crowded = code.height + sum(block.height for block in shown) > ROOM
    if (drawn and (long or crowded)) or (imports and long and shown):
        folded = code_block(cell.source, folded=True)  # behind what it drew, and on the same slide
        shown[-1] = Block(shown[-1].html + folded.html, shown[-1].height + folded.height)
    elif cell.source.strip():
        yield code
    yield from shown


def _gathered(outputs: list[Any]) -> list[Any]:
    """Neighbouring printed pieces as one: the notebook stores them as they came."""
    found: list[Any] = []
    for output in outputs:
        text = output.get("text", "")
        text = text if isinstance(text, str) else "".join(text)
        if output["output_type"] == "stream" and found and found[-1]["output_type"] == "stream":
            found[-1] = {**found[-1], "text": found[-1]["text"] + text}
        else:
            found.append({**output, "text": text} if output["output_type"] == "stream" else output)
    return found
