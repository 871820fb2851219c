"""The board as one HTML file. Jinja escapes every value: nothing in a progress file or a name becomes markup.

The page's policy allows its own style and nothing else: no script, no other host, no frame, no form.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from classroom.workshop import standing
from classroom.workshop.class_files import MOST_LEARNERS, Found
from classroom.workshop.standing import Told
from course_lib.notebook.contents import LabExercise

STYLE = """\
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #fff; --soft: #595959; --line: #b5b5b5; --done: #1b5e20;
  --stuck: #8a3b00; --band: #f3f3f3; }
@media (prefers-color-scheme: dark) { :root { --ink: #f2f2f2; --paper: #161616; --soft: #b8b8b8; --line: #5a5a5a;
  --done: #8fd694; --stuck: #ffb870; --band: #222; } }
body { font: clamp(15px, 1.25vw, 26px)/1.35 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  margin: 1em 1.5em; }
h1 { font-size: 1.5em; margin: 0 0 .3em; }
p { margin: .3em 0; }
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
_PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>The class: Beyond One GPU</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
{%- if every %}<meta http-equiv="refresh" content="{{ every }}">{% endif %}
<meta http-equiv="Content-Security-Policy" content="{{ policy }}"><style>{{ style|safe }}</style></head>
<body><main><h1>The class</h1>
<p class="soft">As of {{ now }}.</p>
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
</main></body></html>
"""


def page(
    found: Sequence[Found[Told]],
    labs: Mapping[str, Sequence[LabExercise]],
    order: str = "name",
    every: float | None = None,
) -> str:
    """The page: one row per learner, in one of `standing.ORDERS`; loaded again after `every` seconds, if given."""
    import jinja2

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
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    text = (
        jinja2.Environment(autoescape=True)
        .from_string(_PAGE)
        .render(
            rows=rows,
            labs=[{"name": lab, "number": numbers[lab]} for lab in labs],
            medians=[f"{medians[lab]:g}" for lab in labs] + [f"{standing.median_of_all(found):g}"],
            cut=MOST_LEARNERS if len(found) == MOST_LEARNERS else 0,
            every=f"{every:g}" if every else "",
            style=STYLE,
            policy=f"default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'sha256-{digest}'",
            now=datetime.now().strftime("%Y-%m-%d %H:%M:%S"),
        )
    )
    return text.encode("utf-8", "replace").decode()


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
