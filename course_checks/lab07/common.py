"""Lab 7 itself; an exercise registers with it."""

from __future__ import annotations

from course_checks.harness import Lab
from course_lib.notebook.contents import ROOT

FOLDER = ROOT / "labs" / "07_axolotl"
lab = Lab("07_axolotl", title="Axolotl, saving, resuming")
