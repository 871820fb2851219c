"""The class's page as it is served: to this machine, read only, in a real browser."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import closing, contextmanager
from pathlib import Path

from test_workshop_board import LAB5, OLD, Read, learner

from classroom.workshop import board
from course_lib.notebook import progress
from course_lib.notebook.progress import ExerciseRecord, Progress


@contextmanager
def served(folder: Path, host: str = "127.0.0.1"):
    server = board.Server(host, 0, board.Board(str(folder)), every=1, order="name")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()


def test_the_server_gives_the_page_and_its_parts_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(board, "LOOKS_APART", 0)
    folder = tmp_path / "class"
    folder.mkdir()
    path = learner(folder, "ada", ("partition", "passed", 1))
    before = {one: (one.stat().st_mtime_ns, one.is_file() and one.read_bytes()) for one in [folder, *folder.rglob("*")]}
    with served(folder) as port:
        status, headers, text = ask(port, "/?sort=stuck")
        assert status == 200 and Read(text).row("ada")[5] == "1/7" and 'aria-current="true">stuck' in text
        policy = headers["Content-Security-Policy"]
        assert (
            "default-src 'none'" in policy and "unsafe" not in policy and headers["X-Content-Type-Options"] == "nosniff"
        )
        for kind, address in (("css", "/style.css"), ("javascript", "/board.js")):
            assert f'"{address}"' in text and ask(port, address)[1]["Content-Type"].startswith(f"text/{kind}")
        assert "//" not in text and " style=" not in text  # nothing from elsewhere, nothing inline
        assert ask(port, "/board?sort=<script>")[2] == board.Board(str(folder)).table("name")
        for wrong in ("/etc/passwd", "/../../etc/passwd", "/ada/progress.json", "/board/", "//[x", "/progress.json"):
            assert ask(port, wrong)[0] == 404 and "ada" not in ask(port, wrong)[2]
        for method in ("POST", "PUT", "DELETE", "HEAD", "<script>"):
            assert ask(port, "/", method)[0] == 501
        # A page from elsewhere that has pointed its own name at this machine.
        for name in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "[::", "", "10.0.0.1"):
            status, _, said = ask(port, "/board", Host=name)
            assert status == 421 and "address that the board printed" in said
        with socket.create_connection(("127.0.0.1", port), 20) as raw:
            raw.sendall(b"GET /board HTTP/1.1\r\nHost: evil.example\r\n\r\n")
            assert b"ada" not in b"".join(iter(lambda: raw.recv(65536), b""))
        assert ask(port, "/board", Host="localhost:8899")[0] == ask(port, "/board", Host="[::1]:8899")[0] == 200
        assert before == {
            one: (one.stat().st_mtime_ns, one.is_file() and one.read_bytes()) for one in [folder, *folder.rglob("*")]
        }
        path.write_text(Progress({LAB5: {"reshard": ExerciseRecord("not yet", 6, OLD)}}).to_json())
        assert "5. A checkpoint" in ask(port, "/board")[2]
        path.write_text("{")
        assert "cannot be read" in ask(port, "/board")[2]
        os.rename(folder, tmp_path / "gone")
        assert ask(port, "/board")[0] == 503
        os.rename(tmp_path / "gone", folder)
        assert ask(port, "/board")[0] == 200


def test_it_listens_on_this_machine_only_unless_asked(tmp_path, monkeypatch, capsys):
    def interrupted(server, _):
        raise KeyboardInterrupt

    monkeypatch.setattr(board.Server, "serve_forever", interrupted)
    assert board.main([str(tmp_path), "--port", "0"]) == 0
    told = capsys.readouterr()
    assert "http://127.0.0.1:" in told.out and not told.err
    assert board.main([str(tmp_path), "--port", "0", "--host", "0.0.0.0"]) == 0
    told = capsys.readouterr()
    assert told.err.count("\n") == 1 and "Anyone who reaches 0.0.0.0" in told.err
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        assert board.main([str(tmp_path), "--port", str(port)]) == 2
    assert (
        capsys.readouterr().err
        == f"Port {port} is in use: give another one with --port, or --port 0 for any that is free.\n"
    )
    assert board.main([str(tmp_path / "nobody")]) == 2 and "not a folder" in capsys.readouterr().err
    assert board.main([str(tmp_path), "--port", "0", "--host", "256.1.1.1"]) == 2
    assert "cannot listen on 256.1.1.1" in capsys.readouterr().err


def test_one_file_that_needs_no_server(tmp_path, capsys):
    (tmp_path / "class").mkdir()
    learner(tmp_path / "class", "ada", ("partition", "passed", 1))
    out = tmp_path / "board.html"
    assert board.main([str(tmp_path / "class"), "--once", str(out)]) == 0
    page = Read(out.read_text())
    assert page.row("ada")[5] == "1/7" and "script" not in page.tags and "link" not in page.tags
    assert board.main([str(tmp_path / "class"), "--once", str(tmp_path / "class" / "b.html")]) == 2
    assert "only read" in capsys.readouterr().err and sorted(os.listdir(tmp_path / "class")) == ["ada"]


def test_ctrl_c_ends_it(tmp_path):
    command = [sys.executable, "-m", "classroom.workshop.command", "board", str(tmp_path), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               cwd=Path(progress.__file__).parent.parent)  # fmt: skip
    try:
        assert "The class is at http://127.0.0.1:" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0 and process.stderr.read() == ""
    finally:
        process.kill()
        process.communicate()


def test_the_page_refreshes_itself_in_a_browser(tmp_path, monkeypatch):
    from browser import chromium, shot

    monkeypatch.setattr(board, "LOOKS_APART", 0)
    path = learner(tmp_path, "ada", ("reshard", "not yet", 6), message="<img src=x onerror=document.title=1>")
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1920, "height": 1080}, color_scheme="dark")
        said = []
        page.on("console", lambda message: said.append(message.text))
        with served(tmp_path) as port:
            page.goto(f"http://127.0.0.1:{port}/")
            page.wait_for_selector("text=6 tries")
            path.write_text(Progress({LAB5: {"reshard": ExerciseRecord("passed", 7, OLD)}}).to_json())
            page.wait_for_selector("tbody td >> text=1/7", timeout=30_000)
            assert page.title() == "The class: Beyond One GPU" and said == []
            shot(page, "workshop-board")
        page.wait_for_selector("#failed:not(:empty)", timeout=30_000)
