"""Sphinx's settings for the course's pages; site/build.py runs it on the pages that it has gathered."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "_ext")]

from gather import repository  # noqa: E402

project = "Beyond One GPU"
author = "the Beyond One GPU authors"
language = "en"
extensions = ["myst_nb", "mathml"]

# Notebooks are shown with the outputs that they hold; nothing is run, and nothing is asked of a host.
nb_execution_mode = "off"
nb_output_stderr = "remove"
nb_merge_streams = True
nb_ipywidgets_js = {}
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 4
html_math_renderer = "mathml"

html_theme = "furo"
html_title = "Beyond One GPU"
html_static_path = ["_static"]
html_css_files = ["course.css"]
html_js_files = ["course.js"]
html_favicon = "_static/logo.svg"
html_logo = "_static/logo.svg"
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_use_index = False
html_domain_indices = False
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"

# The blue and the orange of the course's figures (Okabe and Ito's palette); lighter ones on dark pages.
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#005A8F",
        "color-brand-content": "#005A8F",
        "course-warm": "#E69F00",
    },
    "dark_css_variables": {
        "color-brand-primary": "#7CC4EE",
        "color-brand-content": "#7CC4EE",
        "course-warm": "#E69F00",
    },
    "top_of_page_buttons": [],
    "footer_icons": [{"name": "Repository", "url": repository(), "html": "the repository", "class": ""}],
}


def _menu_headings(app, pagename, templatename, context, doctree) -> None:
    """The menu's captions are headings of a level: Sphinx leaves it out, and screen readers ask for it."""
    if "furo_navigation_tree" in context:
        context["furo_navigation_tree"] = context["furo_navigation_tree"].replace(
            'role="heading"', 'role="heading" aria-level="2"'
        )


def setup(app) -> None:
    app.connect("html-page-context", _menu_headings, priority=900)  # after the theme has drawn its menu
