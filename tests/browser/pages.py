"""A real browser for tests: Debian's Chromium through Playwright, without any network beyond this machine.

Screenshots land in build/screenshots.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# CI runs as root in a container, where the sandbox cannot start; only our own pages are opened.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]


def executable() -> str:
    """Path of the browser; skips the test, with a sentence, where Playwright or Chromium is missing."""
    pytest.importorskip("playwright", reason="Playwright is not installed: pip install playwright")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if not path:
        pytest.skip("no Chromium here (on Debian: apt-get install chromium), so nothing is opened in a browser")
    return path


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless Chromium, closed at the end. Skips the test where there is none."""
    path = executable()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=FLAGS, headless=True)
        try:
            yield browser
        finally:
            browser.close()


def shot(page: Page, name: str) -> None:
    """Keep what the page shows now as build/screenshots/`name`.png."""
    folder = ROOT / "build" / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=folder / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}.png", animations="disabled")
