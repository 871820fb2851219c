"""The course as static pages: ``python site/build.py [FOLDER]`` (build/site), without network and without a kernel.

Three steps: gather the pages beside the folder, let Sphinx write them, follow every link. Any of them fails the build.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from check_links import check  # noqa: E402
from gather import gather  # noqa: E402


def build(out: Path, jobs: str = "auto") -> int:
    """Write the whole site into `out`, whose old content goes; 0 when nothing is wrong with it.

    Raises:
        ValueError: `out` holds something else than a site.
    """
    from sphinx.cmd.build import main as sphinx

    if out.exists() and any(out.iterdir()) and not (out / "searchindex.js").exists():
        raise ValueError(
            f"{out} holds something that is no site; name an empty folder, or one that does not exist yet."
        )
    began = time.monotonic()
    work = out.with_name(f"{out.name}-work")  # what Sphinx reads and remembers; nothing of it belongs on a server
    for folder in (out, work):
        shutil.rmtree(folder, ignore_errors=True)
    source = work / "source"
    gather(source)
    options = ["-q", "-W", "--keep-going", "-j", jobs, "-c", str(HERE), "-d", str(work / "doctrees")]
    built = sphinx(["-b", "html", *options, str(source), str(work / "html")])
    if built:
        print("site: Sphinx found something, see above; nothing was put in place", file=sys.stderr)
        return 1
    shutil.rmtree(work / "html" / "_sources", ignore_errors=True)  # Sphinx leaves it there, empty
    (work / "html").rename(out)
    problems, outside = check(out)
    (work / "external_links.txt").write_text("".join(f"{url}\n" for url in sorted(outside)), encoding="utf-8")
    for problem in problems:
        print(f"site: {problem}", file=sys.stderr)
    files = [path for path in out.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    pages = sum(path.suffix == ".html" for path in files)
    print(
        f"site: {pages} pages, {size / 1e6:.1f} MB in {time.monotonic() - began:.0f} s; {len(problems)} broken links, "
        f"{len(outside)} addresses outside, not fetched ({out.parent.name}/{work.name}/external_links.txt)"
    )
    return 1 if problems else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python site/build.py", description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=HERE.parent / "build" / "site")
    parser.add_argument("-j", "--jobs", default="auto", help="processes that read and write pages (auto: one a core)")
    arguments = parser.parse_args(argv)
    try:
        return build(arguments.folder.resolve(), arguments.jobs)
    except ValueError as error:
        print(f"site: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
