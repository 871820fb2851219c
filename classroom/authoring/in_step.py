"""The command line of what is generated: files that are not in step are written, or with `--check` only named."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence


def run(update: Callable[..., list[str]], description: str | None, arguments: Sequence[str] | None) -> int:
    """Call `update(write=…)`, which names the files that were not in step. Returns 1 if any is not, or cannot be."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; name the files that are not in step")
    check = parser.parse_args(arguments).check
    try:
        changed = update(write=not check)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    for name in changed:
        print(f"{name}: {'not in step' if check else 'written'}")
    return int(check and bool(changed))
