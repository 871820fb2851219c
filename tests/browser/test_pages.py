"""Pages in a browser: the site on a phone and at a desk."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from pages import chromium, shot
from test_site import LESSONS, ROOT, site  # noqa: F401 - the fixture that builds the site

WINDOWS = {"phone": (390, 844), "desk": (1440, 900)}


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="session")
def address(site: Path) -> Iterator[str]:  # noqa: F811
    """The site on a port of this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with chromium() as opened:
        yield opened


# What a reader would stumble over, as a list of sentences.
STUMBLES = """() => {
  const found = [];
  const wide = document.documentElement.scrollWidth;
  if (wide > innerWidth) found.push(`the page is ${wide} px wide in a window of ${innerWidth}`);
  for (const image of document.images)
    if (image.src && !image.naturalWidth) found.push(`no image: ${image.src.slice(-60)}`);
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = texts.nextNode(); text; text = texts.nextNode()) {
    const box = text.parentElement;
    if (!text.data.trim() || box.closest("script, style, title, math, .headerlink") || !box.getClientRects().length) continue;
    const size = parseFloat(getComputedStyle(box).fontSize);
    if (size < 14) found.push(`${size} px: ${text.data.trim().slice(0, 40)}`);
  }
  for (const row of document.querySelectorAll(".sidebar-tree a.reference, .mobile-header label, .ways a, article summary")) {
    const { width, height } = row.getBoundingClientRect();
    if (height && (height < 32 || width < 32)) found.push(`a finger misses ${row.textContent.trim().slice(0, 40)}`);
  }
  return found;
}"""


@pytest.mark.parametrize("window", WINDOWS)
def test_the_site_reads_on_a_phone_and_at_a_desk(browser, address, window):
    width, height = WINDOWS[window]
    page, noise = browser.new_page(viewport={"width": width, "height": height}, reduced_motion="reduce"), []
    page.on("console", lambda message: message.type in ("error", "warning") and noise.append(message.text))
    page.on("pageerror", lambda error: noise.append(str(error)))
    page.on("request", lambda asked: asked.url.startswith((address, "data:")) or noise.append(asked.url))
    for path in ("index", "install", *(f"lessons/{lesson}" for lesson in LESSONS), f"labs/{LESSONS[1]}"):
        page.goto(f"{address}/{path}.html", wait_until="load")
        # A picture that is loaded when it comes into view is asked for now.
        page.evaluate(
            "() => Promise.all([...document.images].map(i => { i.loading = 'eager'; return i.decode().catch(() => 0) }))"
        )
        assert page.evaluate(STUMBLES) == [], path
        if path in ("index", "lessons/01_gpu_memory"):
            shot(page, f"site-{window}-{path.split('/')[-1]}")
    assert noise == []
    if window == "phone":
        page.locator(".mobile-header label[for=__navigation]:visible").click()
        page.locator(".sidebar-tree a[href*='03_collectives']").first.click()
        assert page.url.endswith("03_collectives.html")
    page.close()


# Colours are what axe looks at longest: a page of each kind, with most kinds of element, on white and on black.
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser, address, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = browser.new_page(color_scheme=scheme, reduced_motion="reduce")
    for path in ("index", "lessons/01_gpu_memory" if scheme == "light" else "labs/02_single_gpu"):
        page.goto(f"{address}/{path}.html", wait_until="load")
        violations = axe.run(page, options={"resultTypes": ["violations"]}).response["violations"]
        serious = [found for found in violations if found["impact"] in ("serious", "critical")]
        assert [(v["id"], v["nodes"][0]["html"][:200], v["nodes"][0]["failureSummary"]) for v in serious] == [], path
    shot(page, f"site-{scheme}")
    page.close()
