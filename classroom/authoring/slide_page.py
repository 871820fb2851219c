"""The page that shows slides: one file, no network, keys and buttons, a window with the speaker's notes, one slide a sheet."""

from __future__ import annotations

import html
from collections.abc import Sequence

from classroom.authoring.slide_cutting import Slide
from classroom.authoring.slide_rendering import markdown

CSS = """
* { box-sizing: border-box }
html, body { margin: 0; height: 100%; background: #3a3f47; overflow: hidden }
body { font: 24px/1.4 "Source Sans 3", "Segoe UI", "Helvetica Neue", Arial, sans-serif; color: #1a1a1a }
main { width: 1280px; height: 720px; position: absolute; left: 0; top: 0; transform-origin: 0 0; background: #fff }
section { position: absolute; inset: 0; padding: 26px 48px 40px; visibility: hidden; background: #fff }
section.now { visibility: visible }
.body { height: 590px; overflow: hidden; position: relative; margin-top: 6px }
.body.long { overflow: auto }
.fit { transform-origin: 0 0; min-height: 100% }
h1 { font-size: 46px; line-height: 1.15; margin: 4px 0 8px } h2, .on { font-size: 31px; line-height: 1.2; margin: 0 }
.on { color: #59636e; font-weight: 600 } h3 { font-size: 24px; margin: 2px 0 0; color: #3b4450; display: inline }
h2 + h3, .on + h3 { margin-left: 0 }
p, ul, ol { margin: 0 0 12px } ul, ol { padding-left: 34px }
.asks { color: #8a3b00 }
code { font: 0.84em "DejaVu Sans Mono", Menlo, Consolas, monospace; background: #f0f2f4; padding: 0 3px }
pre { font: 18px/23px "DejaVu Sans Mono", Menlo, Consolas, monospace; margin: 0; white-space: pre-wrap; overflow-wrap: anywhere }
pre code { font: inherit; padding: 0; background: none }
.code, .highlight, .printed { padding: 7px 12px; margin: 2px 0 8px; background: #f6f8fa; border-left: 4px solid #4a6a8a }
.printed { border-color: #9aa4ae; background: #fff; font-size: 17px }
.scrolls { max-height: 530px; overflow: auto }
table { border-collapse: collapse; font-size: 19px; line-height: 1.3; margin: 2px 0 10px }
th, td { padding: 3px 12px; border-bottom: 1px solid #c8ced4; text-align: left; vertical-align: top }
caption { text-align: left; font-size: 18px; color: #3b4450; padding: 2px 0 4px }
.table img { max-width: 760px }
.figure { display: block; margin: 2px auto 6px; max-width: 100% } .display { display: block; text-align: center; margin: 6px }
details > summary { cursor: pointer; font-size: 18px; color: #1f4f7a; padding: 4px 0 }
details[open] { position: absolute; inset: 0; background: #fff; overflow: auto; z-index: 2 }
.later.waits { visibility: hidden }
footer { position: absolute; left: 48px; right: 48px; bottom: 8px; font-size: 15px; line-height: 24px; color: #59636e; display: flex; gap: 14px }
footer .grow { flex: 1 }
button { font: inherit; color: #1f4f7a; background: none; border: 1px solid #9aa4ae; border-radius: 4px; padding: 0 9px; cursor: pointer }
aside { display: none }
a { color: #1f4f7a }
:focus-visible { outline: 3px solid #8a3b00; outline-offset: 1px }
@media print {
  @page { size: 1280px 720px; margin: 0 }
  html, body { overflow: visible; height: auto; background: #fff }
  main { position: static; height: auto; transform: none !important }
  section { position: relative; height: 720px; visibility: visible; overflow: hidden } section + section { break-before: page }
  .later.waits { visibility: visible } footer { display: none }
}
"""

SCRIPT = """
const main = document.querySelector('main'), slides = [...document.querySelectorAll('section')], place = document.getElementById('place');
let at = 0, notes = null;
function size() {
  const scale = Math.min(innerWidth / 1280, innerHeight / 720);
  main.style.transform = `translate(${(innerWidth - 1280 * scale) / 2}px, ${(innerHeight - 720 * scale) / 2}px) scale(${scale})`;
}
function fit(slide) { // smaller, and with longer lines, until it fits; what is still too long scrolls
  const body = slide.querySelector('.body'), inner = slide.querySelector('.fit');
  const room = 720 - 40 - body.offsetTop;
  body.style.height = room + 'px';
  for (let scale = 1; scale > 0.59; scale -= 0.04) {
    inner.style.width = `${100 / scale}%`;
    inner.style.transform = scale < 1 ? `scale(${scale})` : '';
    inner.style.marginBottom = `${inner.offsetHeight * (scale - 1)}px`;
    if (inner.offsetHeight * scale <= room && inner.scrollWidth <= inner.clientWidth + 1) return;
  }
  body.classList.add('long');
  body.tabIndex = 0;
}
function tell() {
  if (!notes || notes.closed) return;
  const next = slides[at + 1];
  notes.document.body.innerHTML = `<p><b>${at + 1} / ${slides.length}</b> then: ${next ? next.getAttribute('aria-label') : 'the end'}</p>`
    + slides[at].querySelector('aside').innerHTML;
}
function show(to, all) {
  at = Math.max(0, Math.min(slides.length - 1, to));
  slides.forEach((slide, i) => { slide.classList.toggle('now', i === at); slide.inert = i !== at; });
  slides[at].querySelectorAll('.later').forEach(later => later.classList.toggle('waits', !all));
  slides[at].querySelectorAll('details[open]').forEach(open => { open.open = false; });
  place.textContent = `${at + 1} / ${slides.length}`;
  try { history.replaceState(null, '', '#' + (at + 1)); } catch (refused) { /* some browsers keep a file's address */ }
  tell();
}
function forward() {
  const waits = slides[at].querySelector('.later.waits');
  if (waits) waits.classList.remove('waits'); else if (at + 1 < slides.length) show(at + 1);
}
function back() { show(at - 1, true); }
function openNotes() {
  notes = open('', 'notes', 'width=640,height=760');
  if (!notes) return;
  notes.document.title = 'Notes: ' + document.title;
  notes.document.body.style.cssText = 'font: 19px/1.45 sans-serif; margin: 20px; max-width: 60ch';
  notes.onkeydown = keys;
  tell();
}
function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest && event.target.closest('summary, button, a') && (event.key === ' ' || event.key === 'Enter')) return;
  const scrolling = event.target.closest && event.target.closest('.scrolls, .long');
  if (scrolling && (event.key === ' ' || event.key.startsWith('Page'))) return;
  const does = {ArrowRight: forward, PageDown: forward, ' ': forward, Enter: forward, ArrowLeft: back, PageUp: back,
    Home: () => show(0), End: () => show(slides.length - 1), n: openNotes,
    f: () => document.documentElement.requestFullscreen && document.documentElement.requestFullscreen(),
    Escape: () => slides[at].querySelectorAll('details[open]').forEach(open => { open.open = false; })}[event.key];
  if (does) { event.preventDefault(); does(); }
}
addEventListener('keydown', keys);
addEventListener('resize', size);
addEventListener('hashchange', () => show((parseInt(location.hash.slice(1)) || 1) - 1));
document.getElementById('forward').onclick = forward;
document.getElementById('back').onclick = back;
document.getElementById('notes').onclick = openNotes;
addEventListener('load', () => {
  size();
  slides.forEach(fit);
  show((parseInt(location.hash.slice(1)) || 1) - 1);
  document.body.dataset.ready = slides.length;
});
"""


def page(title: str, slides: Sequence[Slide], notes: dict[str, str]) -> str:
    """The HTML of a deck. `notes`: Markdown for the speaker by exact heading, "" for the title slide."""
    sections = "\n".join(_section(slide, notes, number) for number, slide in enumerate(slides, 1))
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{html.escape(title)}</title>\n'
        f"<style>{CSS}</style>\n</head>\n<body>\n<main>\n{sections}\n"
        f"<footer><span>{html.escape(title)}</span><span class=grow></span>"
        f'<button id="back" aria-label="back">←</button><span id="place" role="status"></span>'
        f'<button id="forward" aria-label="forward">→</button><button id="notes">notes (n)</button></footer>\n'
        f"</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _section(slide: Slide, notes: dict[str, str], number: int) -> str:
    name = _inline(slide.heading)
    top = f"<h{slide.level}>{name}</h{slide.level}>" if slide.first else f'<p class="on">{name} …</p>'
    if slide.part:
        top += f"<h3>{_inline(slide.part)}</h3>"
    told = "".join(
        markdown(notes[heading]) for heading in dict.fromkeys([slide.heading, slide.part]) if notes.get(heading)
    )
    if number == 1:
        told = markdown(notes.get("", "")) + told
    blocks = "\n".join(block.html for block in slide.blocks)
    label = html.escape(slide.part or slide.heading, quote=True)
    return (
        f'<section id="s{number}" role="group" aria-roledescription="slide" aria-label="{label}">{top}\n'
        f'<div class="body"><div class="fit">{blocks}</div></div>\n<aside>{told}</aside>\n</section>'
    )


def _inline(text: str) -> str:
    """As a heading, lest "3. What crosses the wire" become item 3 of a list."""
    return markdown(f"# {text}").strip().removeprefix("<h1>").removesuffix("</h1>")
