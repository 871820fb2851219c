"""The board as HTML. Jinja escapes every value by itself: nothing in a progress file or a name becomes markup.

The policy that goes with the page allows a style and a script from this server and nothing else: no other host, no
inline script, no frame, no form.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Any

from classroom.workshop import standing
from classroom.workshop.class_files import Found
from classroom.workshop.standing import Told
from course_lib.notebook.contents import LabExercise

NOTHING_ELSE = "default-src 'none'; base-uri 'none'; form-action 'none'"
POLICY = f"{NOTHING_ELSE}; frame-ancestors 'none'; style-src 'self'; script-src 'self'; connect-src 'self'"

STYLE = """\
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #fff; --soft: #595959; --line: #b5b5b5; --done: #1b5e20;
  --stuck: #8a3b00; --band: #f3f3f3; }
@media (prefers-color-scheme: dark) { :root { --ink: #f2f2f2; --paper: #161616; --soft: #b8b8b8; --line: #5a5a5a;
  --done: #8fd694; --stuck: #ffb870; --band: #222; } }
body { font: clamp(15px, 1.25vw, 26px)/1.35 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  margin: 1em 1.5em; }
h1 { font-size: 1.5em; margin: 0 0 .3em; }
p, nav { margin: .3em 0; }
a { color: inherit; } a[aria-current] { font-weight: bold; text-decoration: none; }
nav a { margin-right: .8em; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
caption, .soft, small { color: var(--soft); } caption { text-align: left; padding: .4em 0; }
th, td { border-bottom: 1px solid var(--line); padding: .3em .5em; text-align: left; vertical-align: top; }
thead th, tfoot th, tfoot td { background: var(--band); }
th[scope=row] { overflow-wrap: anywhere; min-width: 6em; max-width: 14em; }
td.count, thead th { white-space: nowrap; } td.all b { color: var(--done); }
td.stuck, td.bad, .failed { color: var(--stuck); overflow-wrap: anywhere; min-width: 12em; }
progress { display: block; width: 4em; height: .4em; accent-color: var(--done); }
small { display: block; }
"""
SCRIPT = """\
"use strict";
const board = document.getElementById("board"), state = document.getElementById("state");
const failed = document.getElementById("failed"), every = 1000 * Number(document.body.dataset.every);
let shown = "";
async function look() {
  try {
    const answer = await fetch("/board" + location.search, { cache: "no-store" });
    if (!answer.ok) throw new Error(answer.status);
    const text = await answer.text();
    if (text !== shown) { board.innerHTML = text; shown = text; }
    state.textContent = "Last looked at " + new Date().toTimeString().slice(0, 8) + ".";
    if (failed.textContent) failed.textContent = "";
  } catch (error) {
    if (!failed.textContent) failed.textContent = "The board no longer answers; this is how it was. It is asked again and again.";
  }
  setTimeout(look, every);
}
setTimeout(look, every);
"""
_FRAGMENT = """\
<div class="wide" role="region" aria-labelledby="caption" tabindex="0"><table>
<caption id="caption">{{ rows|length }} learner{{ "" if rows|length == 1 else "s" }}. In each lab: exercises passed of how many there are, and how many were tried and not passed.
{%- if cut %} No more than {{ cut }} are shown.{% endif %}</caption>
<thead><tr><th scope="col">Learner</th>
{%- for lab in labs %}<th scope="col" title="{{ lab.name }}">Lab {{ lab.number }}</th>{% endfor -%}
<th scope="col">All</th><th scope="col">Stuck</th><th scope="col">Last sign of life</th></tr></thead>
<tbody>
{%- for row in rows %}
<tr><th scope="row">{{ row.name }}</th>
{%- if row.why %}<td class="bad" colspan="{{ labs|length + 2 }}">{{ row.why }}</td>
{%- else %}
{%- for cell in row.cells %}
<td class="count{% if cell.passed == cell.of %} all{% endif %}{% if not cell.passed and not cell.tried %} soft{% endif %}"><b>{{ cell.passed }}</b>/{{ cell.of }}
{%- if cell.passed or cell.tried %}<progress aria-hidden="true" value="{{ cell.passed }}" max="{{ cell.of }}"></progress>{% endif %}
{%- if cell.tried %}<small>{{ cell.tried }} tried</small>{% endif %}</td>
{%- endfor %}
<td class="stuck">{% for one in row.stuck %}<div>Lab {{ one.lab }} · {{ one.title }}: {{ one.tries }} tries{% if one.message %}<small>{{ one.message }}</small>{% endif %}</div>{% endfor %}{% if row.more %}<small>and {{ row.more }} more</small>{% endif %}</td>
{%- endif %}<td>{% if row.when %}<time datetime="{{ row.when }}">{{ row.ago }}</time>{% else %}<span class="soft">none yet</span>{% endif %}
{%- if row.unknown %}<small>{{ row.unknown }} tried that this course does not have</small>{% endif %}</td></tr>
{%- endfor %}
</tbody>
<tfoot><tr><th scope="row">Median passed</th>{% for median in medians %}<td>{{ median }}</td>{% endfor %}<td></td><td></td></tr></tfoot>
</table></div>
"""
_PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>The class: Beyond One GPU</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
{%- if style %}<meta http-equiv="Content-Security-Policy" content="{{ policy }}"><style>{{ style|safe }}</style>
{%- else %}<link rel="stylesheet" href="/style.css"><script src="/board.js" defer></script>{% endif %}
</head>
<body data-every="{{ every }}"><main><h1>The class</h1>
{%- if not style %}
<nav aria-label="Order of the rows">Sorted by {% for one in orders %}<a href="/?sort={{ one }}"{% if one == order %} aria-current="true"{% endif %}>{{ one }}</a> {% endfor %}</nav>
{%- endif %}
<p id="state" class="soft">Last looked at {{ now }}.</p><p id="failed" class="failed" role="status"></p>
<div id="board">{{ fragment|safe }}</div></main></body></html>
"""


@cache
def _templates() -> Any:
    import jinja2

    return jinja2.Environment(autoescape=True, loader=jinja2.DictLoader({"page": _PAGE, "fragment": _FRAGMENT}))


def fragment(
    found: Sequence[Found[Told]], labs: Mapping[str, Sequence[LabExercise]], order: str = "name", cut: int = 0
) -> str:
    """The table alone, as the page asks for it again and again; `cut` is the limit where learners were left out."""
    medians = standing.medians(found, labs)
    numbers = {lab: int(lab[:2]) for lab in labs}
    rows = []
    for one in sorted(found, key=standing.ORDERS[order]):
        when = standing.last_sign(one)
        row: dict[str, Any] = {"name": one.name, "why": one.why, "when": None if when is None else _stamp(when)}
        row["ago"] = "" if when is None else ago(time.time() - when)
        if one.told:
            row["unknown"] = one.told.unknown
            row["stuck"] = [
                {**vars(stuck), "lab": numbers[stuck.lab]} for stuck in one.told.stuck[: standing.STUCK_SHOWN]
            ]
            row["more"] = max(0, len(one.told.stuck) - standing.STUCK_SHOWN)
            counts = [(*one.told.counts[lab], len(exercises)) for lab, exercises in labs.items()]
            counts.append(tuple(map(sum, zip(*counts, strict=True))))
            row["cells"] = [{"passed": passed, "tried": tried, "of": of} for passed, tried, of in counts]
        rows.append(row)
    middle = [f"{medians[lab]:g}" for lab in labs] + [f"{standing.median_of_all(found):g}"]
    heads = [{"name": lab, "number": numbers[lab]} for lab in labs]
    return _templates().get_template("fragment").render(rows=rows, labs=heads, medians=middle, cut=cut)


def page(table: str, *, every: float, order: str, alone: bool = False) -> str:
    """The whole page around `fragment`'s table; `alone` for a file that needs no server and does not refresh."""
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    return _templates().get_template("page").render(
        fragment=table, every=f"{every:g}", order=order, orders=list(standing.ORDERS), style=STYLE if alone else "",
        policy=f"{NOTHING_ELSE}; style-src 'sha256-{digest}'",
        now=datetime.now().strftime("%Y-%m-%d %H:%M" if alone else "%H:%M:%S"),
    )  # fmt: skip


def ago(seconds: float) -> str:
    """How long ago, in the one unit that fits."""
    minutes = max(0, int(seconds // 60))
    if minutes < 1:
        return "just now"
    if minutes < 120:
        return f"{minutes} min ago"
    return f"{minutes // 60} h ago" if minutes < 48 * 60 else f"{minutes // 1440} days ago"


def _stamp(when: float) -> str:
    return datetime.fromtimestamp(when, UTC).isoformat(timespec="seconds")
