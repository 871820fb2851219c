"""What a page shows of a program and of a list of rows."""

from __future__ import annotations

import functools
import html.parser
import inspect

import numpy as np
import pytest

from course_lib import notebook
from course_lib.notebook import show, table


class Text(html.parser.HTMLParser):
    """A page's tags and its text as a reader sees it; raises where the tags do not close in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open, self.tags, self.text = [], [], ""
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


class Wiggly:
    """A class whose source holds <b>tags</b>, "quotes" & an ampersand."""

    def grow(self, x: int) -> bool:
        return 1 < x and x > 2


def sample(x: int) -> str:
    return f"<script>alert({x})</script> &amp;"


@pytest.mark.parametrize(
    ("thing", "name"),
    [(notebook, "course_lib.notebook"), (sample, "sample"), (Wiggly, "Wiggly"), (Wiggly.grow, "grow")],
)
def test_the_source_of_a_module_a_function_or_a_class(thing, name):
    shown = show(thing)
    source = inspect.getsource(thing)
    assert repr(shown) == source
    page = Text(shown._repr_html_())
    file = "__init__.py" if thing is notebook else "test_notebook.py"
    summary = f"Source of {name} ({file}, {len(source.splitlines())} lines)"
    assert page.text.startswith(summary)
    assert page.text.removeprefix(summary).strip("\n") == source.strip("\n")
    assert [tag for tag, _ in page.tags[:3]] == ["details", "summary", "code"]
    assert not any("open" in attributes for tag, attributes in page.tags if tag == "details")  # folded
    assert {tag for tag, _ in page.tags} <= {"details", "summary", "code", "div", "pre", "span"}


def test_a_name_is_escaped():
    def known(): ...

    known.__name__ = "<lambda> & co"
    page = show(known)._repr_html_()
    assert "<code>&lt;lambda&gt; &amp; co</code>" in page
    assert Text(page).text.startswith("Source of <lambda> & co (")


def test_source_is_readable_on_a_dark_page():
    style = next(a["style"] for tag, a in Text(show(sample)._repr_html_()).tags if tag == "div")
    assert style == "background: #f8f8f8; color: #1a1a1a"


@pytest.mark.parametrize(
    "thing", [3, "text", None, len, dict, Wiggly(), functools.partial(sample, 1), sample.__code__, [sample]]
)
def test_a_thing_without_source_to_show(thing):
    with pytest.raises(ValueError, match="has no Python source to show; give a module, a function or a class"):
        show(thing)


ROWS = [
    {"link": "NVLink <b> & co", "bytes": 1234567, "speed-up": 1.97654, "on": True},
    {"link": "Ethernet", "bytes": 4, "speed-up": 123456.7, "on": False},
]


def test_text_is_aligned():
    assert repr(table(ROWS, caption="Links")) == "\n".join(
        [
            "Links",
            "link                 bytes  speed-up  on",
            "NVLink <b> & co  1,234,567     1.977  True",
            "Ethernet                 4   123,457  False",
        ]
    )


def test_the_page_says_the_same():
    page = Text(table(ROWS, caption="a <b> c")._repr_html_())
    assert (
        page.text == "a <b> c" + "linkbytesspeed-upon" + "NVLink <b> & co1,234,5671.977True" + "Ethernet4123,457False"
    )
    cells = [(tag, attributes) for tag, attributes in page.tags if tag in ("th", "td")]
    assert [tag for tag, _ in cells] == ["th"] * 4 + ["td"] * 8
    sides = [attributes["style"].removeprefix("text-align:") for _, attributes in cells]
    assert sides == ["left", "right", "right", "left"] * 3
    assert all(attributes.get("scope") == ("col" if tag == "th" else None) for tag, attributes in cells)
    assert [tag for tag, _ in page.tags].count("tr") == 3


def test_no_caption():
    shown = table([{"a": 1}])
    assert repr(shown) == "a\n1" and "caption" not in shown._repr_html_()


def test_numbers_of_other_libraries_and_keys_that_are_no_text():
    shown = table([{2: np.int64(16384), None: np.float32(0.5)}, {2: 1, None: 2.0}])
    assert repr(shown).splitlines() == ["     2  None", "16,384   0.5", "     1     2"]


def test_a_missing_or_odd_value_leaves_its_column_as_text():
    assert repr(table([{"name": "a", "n": 1}, {"name": "b"}])).splitlines() == ["name  n", "a     1", "b"]
    assert repr(table([{"n": 100}, {"n": "many"}])).splitlines() == ["n", "100", "many"]


def test_no_rows():
    with pytest.raises(ValueError, match="A table needs at least one row"):
        table([])
