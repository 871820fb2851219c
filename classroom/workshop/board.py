"""``beyond class board FOLDER``: the class's progress on a page, from the learners' progress files.

FOLDER holds a folder for each learner with progress.json in it, or files such as ada.json; a pattern does, too:
``board '/home/*/.local/share/beyond-one-gpu/progress.json'``. To have them in one place, start each learner's JupyterLab
with BEYOND_ONE_GPU_HOME=/srv/class/ada. A progress file is its learner's alone (mode 0600): run the board as
root, or copy the files together, with their times (rsync -t). Names are what the folders are called. Nothing is written.
"""

from __future__ import annotations

import argparse
import errno
import ipaddress
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from classroom.workshop import board_page, class_files, standing
from course_lib.notebook import contents

LOOKS_APART = 0.5
"""Seconds for which what was read is used again: many who look at the page read the files no more often than one."""


class Board:
    """The class as it stands, read again when somebody asks."""

    def __init__(self, folder: str):
        """Raises ValueError for a folder that is not there, and OSError for one that cannot be listed."""
        self.labs = contents.labs()
        self.where = class_files.class_folder(folder)
        self._reader = class_files.Reader(self.where, lambda progress: standing.in_short(progress, self.labs))
        self._guard = threading.Lock()
        self._read_at = -1e9
        self.read()

    def read(self) -> list[class_files.Found[standing.Told]]:
        """Every learner. Raises OSError when the class's folder cannot be listed any more."""
        with self._guard:
            if time.monotonic() - self._read_at > LOOKS_APART:
                self._found, self._read_at = self._reader.read(), time.monotonic()
            return self._found

    def table(self, order: str) -> str:
        """The table of the page."""
        found = self.read()
        cut = class_files.MOST_LEARNERS if len(found) == class_files.MOST_LEARNERS else 0
        return board_page.fragment(found, self.labs, order, cut)


class Handler(BaseHTTPRequestHandler):
    """GET of the page, its table, its style and its script; everything else is refused in one line."""

    server: Server
    timeout = 10  # seconds: a visitor who sends half a request does not keep a thread for ever
    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        """Answer one request."""
        if not self.server.is_asked_for(self.headers.get_all("Host") or []):
            self.send_error(421)
            return
        try:
            asked = urlsplit(self.path)
        except ValueError:
            self.send_error(404)
            return
        order = parse_qs(asked.query).get("sort", [self.server.order])[-1]
        order = order if order in standing.ORDERS else self.server.order
        try:
            if asked.path == "/":
                self._answer(
                    board_page.page(self.server.board.table(order), every=self.server.every, order=order), "html"
                )
            elif asked.path == "/board":
                self._answer(self.server.board.table(order), "html")
            elif asked.path == "/style.css":
                self._answer(board_page.STYLE, "css")
            elif asked.path == "/board.js":
                self._answer(board_page.SCRIPT, "javascript")
            else:
                self.send_error(404)
        except (ConnectionError, TimeoutError):
            return  # the visitor has left
        except OSError:
            self.send_error(503)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """One line of text, which repeats nothing that was sent."""
        told = {404: "There is no such page.", 421: "Ask for this page by the address that the board printed.",
                503: "The class's folder cannot be read any more."}  # fmt: skip
        self._answer(told.get(code, "This server answers GET alone."), "plain", code)
        self.close_connection = True

    def _answer(self, text: str, kind: str, code: int = 200) -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(code)
        self.send_header("Content-Type", f"text/{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", board_page.POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        """No version of Python or of the server."""
        return "board"

    def log_message(self, *_: object) -> None:
        """Nothing: what a visitor sends does not belong on the instructor's terminal."""


class Server(ThreadingHTTPServer):
    """The board on `host` and `port` (0: any free one)."""

    daemon_threads = True

    def __init__(self, host: str, port: int, board: Board, *, every: float, order: str):
        """Raises OSError when the port is in use or the host is not this machine's."""
        self.board, self.every, self.order = board, every, order
        self.loopback = is_loopback(host)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), Handler)

    def server_bind(self) -> None:
        """Bind, without asking a name server for the host's full name, as HTTPServer does."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]

    def is_asked_for(self, hosts: Sequence[str]) -> bool:
        """Whether the Host header names this server.

        On loopback only this machine's own names do: a page from elsewhere may point a name of its own at 127.0.0.1,
        and would read the board through the instructor's browser.
        """
        if len(hosts) != 1:
            return False
        try:
            return not self.loopback or is_loopback(urlsplit(f"//{hosts[0]}").hostname or "")
        except ValueError:
            return False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks off is no news; a mistake of ours is."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the board until Ctrl-C, or write it once. Returns 2 for a folder, host or port that cannot be used."""
    parser = argparse.ArgumentParser(
        prog="beyond class board",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="FOLDER", help="one folder or file for each learner, or a pattern in quotes")
    parser.add_argument("--port", type=int, default=8899)
    parser.add_argument("--host", default="127.0.0.1", help="another address of this machine lets the network read it")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two looks of the page (5)")
    parser.add_argument("--sort", choices=list(standing.ORDERS), default="name")
    parser.add_argument("--once", type=Path, metavar="OUT.html", help="write the page into a file and end")
    given = parser.parse_args(argv)
    if not 1 <= given.every <= 3600 or not 0 <= given.port <= 65535:
        parser.error("--every takes 1 to 3600 seconds, --port 0 to 65535")
    try:
        board = Board(given.folder)
        if given.once:
            _write_once(board, given)
            return 0
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{error.filename or given.folder}: {error.strerror or error}", file=sys.stderr)
        return 2
    try:
        server = Server(given.host, given.port, board, every=given.every, order=given.sort)
    except OSError as error:
        print(f"Port {given.port} is in use: give another one with --port, or --port 0 for any that is free."
              if error.errno == errno.EADDRINUSE
              else f"The board cannot listen on {given.host}, port {given.port}: {error.strerror or error}.", file=sys.stderr)  # fmt: skip
        return 2
    return _serve(server, given.host)


def _serve(server: Server, host: str) -> int:
    shown = f"[{host}]" if ":" in host else host
    try:
        with server:
            if not server.loopback:
                print(
                    f"Anyone who reaches {shown} can read the names and the progress there, without a password.",
                    file=sys.stderr,
                )
            print(f"The class is at http://{shown}:{server.server_address[1]} (Ctrl-C ends it)", flush=True)
            server.serve_forever(0.2)
    except KeyboardInterrupt:
        print()
    return 0


def _write_once(board: Board, given: argparse.Namespace) -> None:
    """Raises ValueError for a place inside the class's folder: nothing is written there."""
    out = given.once.absolute()
    if out.resolve().is_relative_to(board.where.folder.resolve()):
        raise ValueError(f"{out} lies in the class's folder, which is only read: give a place outside it")
    text = board_page.page(board.table(given.sort), every=given.every, order=given.sort, alone=True)
    half = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        half.write_text(text, encoding="utf-8", errors="replace")
        os.replace(half, out)
    finally:
        half.unlink(missing_ok=True)
    print(f"Written: {out}")


if __name__ == "__main__":
    sys.exit(main())
