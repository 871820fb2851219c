"""Post a sentence to a chat: Slack, Mattermost, Discord, or any receiver of a small JSON; the caller never waits."""

from __future__ import annotations

import ipaddress
import json
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import SplitResult, urlsplit

TIMEOUT = 5.0  # seconds that a receiver may be silent
ATTEMPTS = 3
BACK_OFF = 1.0  # seconds before the second attempt, twice that before the third
QUEUE_LENGTH = 100  # sentences that may wait for a receiver; later ones are dropped, and counted


def check(url: str) -> SplitResult:
    """Split a webhook's URL. Raises ValueError if it is none, without repeating it: the URL is a secret."""
    example = "give one like https://hooks.slack.com/services/..."
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except (ValueError, AttributeError, TypeError):
        usable = False
    if not usable or any(character.isspace() for character in url):
        raise ValueError(f"the webhook is no URL of http or https: {example}")
    return parts


def post(url: str, text: str, *, timeout: float = TIMEOUT) -> None:
    """Post one sentence, once.

    Args:
        url: the webhook. Slack, Mattermost and most others take ``{"text": …}``, Discord ``{"content": …}``.
        text: the sentence.
        timeout: seconds that the receiver may be silent.

    Raises:
        ValueError: ``url`` is no URL.
        OSError: it does not answer, or refuses (``urllib.error.HTTPError`` with its ``code``).
    """
    parts = check(url)
    host = str(parts.hostname)
    discord = host in ("discord.com", "discordapp.com") or host.endswith((".discord.com", ".discordapp.com"))
    body = json.dumps({"content" if discord else "text": text}).encode()
    headers = {"Content-Type": "application/json", "User-Agent": "beyond-one-gpu"}
    request = urllib.request.Request(url, data=body, headers=headers, method="POST")
    # a company's proxy cannot reach this machine itself
    handlers = [urllib.request.ProxyHandler({})] if _is_loopback(host) else []
    with urllib.request.build_opener(*handlers).open(request, timeout=timeout) as answer:
        answer.read(1000)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Messenger:
    """Post sentences from a thread, so that the caller continues at once.

    Args:
        url: the webhook.
        tell: called with one sentence when a message could not be delivered.
        timeout, attempts, back_off: see above; an answer of 4xx is final, except for 408 and 429.
    """

    def __init__(
        self,
        url: str,
        tell: Callable[[str], None],
        *,
        timeout: float = TIMEOUT,
        attempts: int = ATTEMPTS,
        back_off: float = BACK_OFF,
    ) -> None:
        self._host = check(url).hostname
        self._url, self._tell = url, tell
        self._timeout, self._attempts, self._back_off = timeout, attempts, back_off
        self._texts: queue.Queue[str | None] = queue.Queue(QUEUE_LENGTH)
        self._stop = threading.Event()
        self.delivered = self.lost = 0
        self._thread = threading.Thread(target=self._work, name="webhook", daemon=True)
        self._thread.start()

    def send(self, text: str) -> None:
        """Queue a sentence; never waits, never raises."""
        try:
            self._texts.put_nowait(text)
        except queue.Full:
            self.lost += 1

    def close(self) -> None:
        """Deliver what is queued, for as long as one attempt may take; then stop."""
        try:
            self._texts.put_nowait(None)
        except queue.Full:
            self._stop.set()
        self._thread.join(self._timeout)
        self._stop.set()
        self._thread.join(self._timeout + 0.5)  # the attempt under way ends by its own timeout

    def _work(self) -> None:
        while not self._stop.is_set() and (text := self._texts.get()) is not None:
            reason = self._deliver(text)
            if not reason:
                self.delivered += 1
                continue
            self.lost += 1
            self._tell(f"the webhook at {self._host} did not take the message ({reason}); training goes on.")

    def _deliver(self, text: str) -> str:
        reason = ""
        for attempt in range(self._attempts):
            if attempt and self._stop.wait(self._back_off * 2 ** (attempt - 1)):
                break
            try:
                post(self._url, text, timeout=self._timeout)
                return ""
            except urllib.error.HTTPError as error:
                reason = f"it answered {error.code}"
                error.close()
                if 400 <= error.code < 500 and error.code not in (408, 429):
                    break
            except Exception as error:  # whatever a receiver answers, even what is no HTTP, must not end the watchdog
                reason = str(getattr(error, "reason", "") or error) or type(error).__name__
        return reason


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
