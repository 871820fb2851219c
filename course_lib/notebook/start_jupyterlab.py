"""``python -m course_lib.notebook.start_jupyterlab``: JupyterLab with its own options, two seconds sooner.

Nearly half of its start goes into compiling a grammar of internationalized addresses (rfc3987_syntax), with which
jsonschema could check a format that no schema of Jupyter's names. jsonschema does without where the package is missing.

A kernel holds its lesson's models, gigabytes of them, until it ends. One that is idle and that no open tab is connected to
is ended after half an hour; what its notebook shows stays. Another number of seconds on the command line wins, 0 for never.
"""

from __future__ import annotations

import sys
from typing import Any

IDLE_MINUTES = 30


def main() -> None:
    """Start the server; returns when it ends."""
    missing: dict[str, Any] = {"rfc3987_syntax": None}  # Python's way to say that a module is not there
    sys.modules.update(missing)
    from jupyterlab.labapp import main as start

    cull = "--MappingKernelManager.cull_"
    if not any(argument.startswith(f"{cull}idle_timeout") for argument in sys.argv):
        sys.argv += [f"{cull}idle_timeout={60 * IDLE_MINUTES}", f"{cull}interval=60"]
        print(f"Kernels whose notebook is closed are ended after {IDLE_MINUTES} idle minutes.", flush=True)
    start()


if __name__ == "__main__":
    main()
