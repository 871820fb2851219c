"""What the watchdog posts arrives; a receiver that is silent, broken or not there holds up nobody."""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from course_tools.monitoring import Watchdog, webhook


class Receiver:
    """A local chat: answers with the codes given, in turn, the last one for ever; ``None`` hangs until the end."""

    def __init__(self, *codes: int | None) -> None:
        self.got: list[dict] = []
        self.calls = 0
        self.over = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                code = codes[min(receiver.calls, len(codes) - 1)]
                receiver.calls += 1
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if code is None:
                    receiver.over.wait()
                    return
                if code == 200:
                    receiver.got.append(body)
                self.send_response(code)
                self.end_headers()

            def log_message(self, *_) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/services/SECRET"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_) -> None:
        self.over.set()
        self.server.shutdown()
        self.server.server_close()


def bark(tmp_path, url: str, **options) -> tuple[Watchdog, list[str]]:
    """A watchdog that misses its rank at once, and is left as soon as it has said so."""
    told: list[str] = []
    with Watchdog(tmp_path, ranks=1, webhook=url, tell=told.append, start_within=0.05, name="run 7", **options) as dog:
        assert dog.wait(60)
    assert not [thread for thread in threading.enumerate() if thread.name in ("watchdog", "webhook")]
    return dog, told


def test_the_alarm_arrives_also_at_the_second_attempt(tmp_path):
    with Receiver(500, 200) as chat:
        dog, told = bark(tmp_path, chat.url, back_off=0.05)
    assert chat.got == [{"text": f"run 7: {dog.alarms[0].sentence}"}] and chat.calls == 2
    assert told == [dog.alarms[0].sentence]


@pytest.mark.parametrize(
    "codes, calls, reason",
    [((500,), 3, "it answered 500"), ((404,), 1, "it answered 404"), ((None,), 1, "timed out")],
    ids=["broken", "wrong address", "silent"],
)
def test_a_receiver_that_fails_is_told_once_and_holds_up_nobody(tmp_path, codes, calls, reason):
    with Receiver(*codes) as chat:
        dog, told = bark(tmp_path, chat.url, back_off=0.05, timeout=0.5)
    assert chat.calls == calls
    assert told[0] == dog.alarms[0].sentence  # the alarm itself did not wait
    assert len(told) == 2 and reason in told[1] and "SECRET" not in told[1]


def test_a_refused_port_is_told(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
        _, told = bark(tmp_path, f"http://127.0.0.1:{taken.getsockname()[1]}/", attempts=2, back_off=0.05)
    assert "refused" in told[1]


@pytest.mark.parametrize(
    "url", ["slack", "ftp://host/x", "http://", "https://host:port/", "https://ho st/", 7, "http://host:99999/"]
)
def test_what_is_no_url_is_refused_at_the_start(tmp_path, url):
    with pytest.raises(ValueError, match="no URL"):
        Watchdog(tmp_path, ranks=1, webhook=url)
    assert not [thread for thread in threading.enumerate() if thread.name == "webhook"]


def test_handing_over_never_waits_and_discord_has_its_own_key(monkeypatch):
    sent = []

    class Opener:
        def open(self, request, timeout):
            sent.append(json.loads(request.data))
            raise OSError("no network here")

    monkeypatch.setattr(webhook.urllib.request, "build_opener", lambda *_: Opener())
    for url in ("https://discord.com/api/webhooks/1", "https://notdiscord.com/"):
        with pytest.raises(OSError):
            webhook.post(url, "rank 1 hangs")
    assert sent == [{"content": "rank 1 hangs"}, {"text": "rank 1 hangs"}]
    messenger = webhook.Messenger("https://notdiscord.com/", lambda _: None, back_off=1e6)
    for _ in range(webhook.QUEUE_LENGTH + 50):
        messenger.send("x")
    messenger.close()
    assert messenger.lost >= 49
