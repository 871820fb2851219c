"""Post a sentence to a chat: Slack, Mattermost, or any receiver of a small JSON."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.error import HTTPError
from urllib.parse import urlsplit

TIMEOUT = 5.0  # seconds that a receiver may be silent
PAUSE = 1.0  # seconds before the second attempt


def check(url: str) -> None:
    """Raise ValueError if a webhook's URL is none, without repeating it: the URL is a secret."""
    if not isinstance(url, str) or not re.fullmatch(r"https?://[\w.-]+(:\d+)?(/\S*)?", url):
        raise ValueError("the webhook is no URL of http or https: give one like https://hooks.slack.com/services/...")


def post(url: str, text: str) -> None:
    """Post ``{"text": text}`` once. Raises OSError if the receiver does not answer, or refuses."""
    headers = {"Content-Type": "application/json", "User-Agent": "beyond-one-gpu"}
    request = urllib.request.Request(url, json.dumps({"text": text}).encode(), headers, method="POST")
    # a company's proxy cannot reach this machine itself
    direct = [urllib.request.ProxyHandler({})] if urlsplit(url).hostname in ("127.0.0.1", "localhost") else []
    with urllib.request.build_opener(*direct).open(request, timeout=TIMEOUT) as answer:
        answer.read(1000)


def deliver(url: str, text: str, tell: Callable[[str], None]) -> None:
    """Post a sentence, if need be a second time; where that fails too, `tell` is called, without the URL."""
    reason = ""
    for pause in (0.0, PAUSE):
        time.sleep(pause)
        try:
            post(url, text)
            return
        except HTTPError as error:
            reason = f"it answered {error.code}"
        except Exception as error:  # whatever a receiver answers, even what is no HTTP
            reason = type(error).__name__
    tell(f"the webhook at {urlsplit(url).hostname} did not take the message ({reason}); training goes on.")


class Inbox(HTTPServer):
    """A chat on this machine: takes what is posted to `url`, from the start to the end of its ``with`` block.

    `texts` has (seconds of ``time.monotonic``, sentence) for each message.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receives)
        self.texts: list[tuple[float, str]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> Inbox:
        threading.Thread(target=self.serve_forever, args=(0.05,), name="inbox", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Receives(BaseHTTPRequestHandler):
    server: Inbox

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.texts.append((time.monotonic(), message["text"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass
