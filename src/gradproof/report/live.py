"""Serves the page while a run grows. Only reads files: the training process does not know of it.

Loopback only, unless a token guards it. What is asked for is a run of the served directory, by a name that the
directory itself lists: no path comes from outside.
"""

from __future__ import annotations

import hmac
import http.cookies
import json
import os
import secrets
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from gradproof.diagnosis.ranking import diagnose
from gradproof.errors import UserError
from gradproof.record.run import open_run
from gradproof.record.schema import EVENTS_FILE, FRAMES_FILE, INFO_FILE, STEPS_FILE, json_line
from gradproof.report.html import pack_runs, render_live_page
from gradproof.report.payload import pack_run

LOOPBACK = ("127.0.0.1", "localhost", "::1")
COOKIE = "gradproof"
LOOK_EVERY = 0.5  # seconds between two looks at the sizes of a run's files
REST = (
    4  # a run is read again after so many times what reading it took: a large one must not keep a core busy
)
TAIL = 4096  # bytes from the end of steps.csv that hold its last row
QUIET = 60.0  # seconds without a word after which a stream says that it is still there
MOST_COMPARED = 8


class Runs:
    """The runs of a directory, or the one run that the directory is."""

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise UserError(
                f"there is no directory {self.path}; `gradproof run train.py` makes runs under runs/"
            )
        self.only = self.path.name or "run" if (self.path / INFO_FILE).exists() else None
        self._packed: dict[str, dict[str, str]] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def find(self, name: str) -> Path:
        """The directory of a run; only names that are really there are known."""
        found = self.directories().get(name)
        if found is None:
            raise UserError(f"there is no run {name!r} here")
        return found

    def directories(self) -> dict[str, Path]:
        """By name: every run at this place; `gradproof train` has its own one level below, at NAME/record."""
        if self.only:
            return {self.only: self.path}
        files = [*self.path.glob(f"*/{INFO_FILE}"), *self.path.glob(f"*/record/{INFO_FILE}")]
        inside = self.path.resolve()
        folders = [
            file.parent for file in files if file.resolve().is_relative_to(inside)
        ]  # no link leads out
        return {folder.relative_to(self.path).as_posix(): folder for folder in folders}

    def summaries(self) -> list[dict[str, Any]]:
        """The newest first, each with what can be told without reading all of it."""
        found = [summarise(name, folder) for name, folder in self.directories().items()]
        return sorted(found, key=lambda run: -run["written"])

    def pack(self, name: str) -> dict[str, str]:
        """A run for the page; read again only if it has grown."""
        folder = self.find(name)
        with self._lock:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            version = version_of(folder)
            kept = self._packed.get(name)
            if kept is None or kept["version"] != version:
                self._packed[name] = kept = {**pack_run(open_run(folder)), "version": version}
            return kept

    def compare(self, names: list[str]) -> dict[str, Any]:
        if not 2 <= len(names) <= MOST_COMPARED:
            raise UserError(f"2 to {MOST_COMPARED} runs can be compared, not {len(names)}")
        runs = [open_run(self.find(name)) for name in names]
        return pack_runs(runs, [diagnose(run) for run in runs])


def version_of(folder: Path) -> str:
    """A word that changes when a run's files do."""
    found = []
    for name in (STEPS_FILE, FRAMES_FILE, EVENTS_FILE, INFO_FILE):
        try:
            status = (folder / name).stat()
            found.append(f"{status.st_size}.{status.st_mtime_ns}")
        except OSError:
            found.append("0")
    return "-".join(found)


def summarise(name: str, folder: Path) -> dict[str, Any]:
    """Steps, last loss and end of a run, from the ends of its files."""
    steps, loss, written = 0, None, 0.0
    try:
        with open(folder / STEPS_FILE, "rb") as stream:
            columns = stream.readline().decode().strip().split(",")
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - TAIL))
            rows = stream.read().decode("utf-8", "replace").split("\n")[:-1]  # whole rows only
        written = (folder / STEPS_FILE).stat().st_mtime
        last = rows[-1].split(",") if rows else []
        if len(last) == len(columns) and last != columns:
            row = dict(zip(columns, last, strict=True))
            steps, loss = int(float(row["step"])) + 1, row.get("loss") or None
    except (OSError, ValueError, KeyError):
        pass
    return {"name": name, "steps": steps, "loss": loss, "written": written, "ended": has_ended(folder)}


def has_ended(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / INFO_FILE).read_text(encoding="utf-8")).get("ended"))
    except (OSError, ValueError, AttributeError):
        return False


class LiveServer(ThreadingHTTPServer):
    """Serves runs at an address; without a token only to this machine."""

    daemon_threads = True

    def __init__(self, runs: Runs, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> None:
        if host not in LOOPBACK and not token:
            raise UserError(
                f"{host} can be reached from other machines: give a token (--token auto makes one), "
                "or leave --host away to serve this machine only"
            )
        self.runs = runs
        self.token = secrets.token_urlsafe(24) if token == "auto" else token
        self.stopping = threading.Event()
        try:
            super().__init__((host, port), Handler)
        except OSError as error:
            raise UserError(f"cannot serve at {host}:{port}: {error.strerror or error}") from None

    @property
    def url(self) -> str:
        """What to open in a browser."""
        host, port = self.server_address[0], self.server_address[1]
        query = f"?token={self.token}" if self.token else ""
        return f"http://{host if isinstance(host, str) else host.decode()}:{port}/{query}"

    def knows_host(self, header: str | None) -> bool:
        """The Host that a browser names is this server's: no foreign site's name has been pointed at it."""
        try:
            name = urlsplit(f"//{header or ''}").hostname
        except ValueError:
            return False
        return name in (*LOOPBACK, str(self.server_address[0]).lower()) or bool(self.token and name)

    def shutdown(self) -> None:
        self.stopping.set()
        super().shutdown()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closes its tab is no error."""


class Handler(BaseHTTPRequestHandler):
    """GET only, five addresses."""

    server: LiveServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        query = parse_qs(address.query)
        if not self.server.knows_host(self.headers.get("Host")):
            return self._refuse(403, "this host name is not served here")
        if not self._may_read(query):
            return self._refuse(403, "open the address that `gradproof live` printed, with its token")
        if self.server.token and "token" in query:
            return self._remember_token()
        answer = ANSWERS.get(address.path)
        if answer is None:
            return self._refuse(404, "there is nothing at this address")
        try:
            answer(self, query)
        except UserError as error:
            self._refuse(404, str(error))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _may_read(self, query: dict[str, list[str]]) -> bool:
        token = self.server.token
        if not token:
            return True
        cookie = http.cookies.SimpleCookie()
        try:
            cookie.load(self.headers.get("Cookie", ""))
        except http.cookies.CookieError:
            return False
        given = [*query.get("token", []), *([cookie[COOKIE].value] if COOKIE in cookie else [])]
        return any(hmac.compare_digest(each.encode(), token.encode()) for each in given)

    def _remember_token(self) -> None:
        """Into a cookie and out of the address bar."""
        self.send_response(303)
        self.send_header("Location", "/")
        self.send_header("Set-Cookie", f"{COOKIE}={self.server.token}; HttpOnly; SameSite=Strict; Path=/")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def page(self, query: dict[str, list[str]]) -> None:
        self._send("text/html; charset=utf-8", render_live_page(self.server.runs.only).encode())

    def list_runs(self, query: dict[str, list[str]]) -> None:
        self._send_json({"runs": self.server.runs.summaries(), "directory": str(self.server.runs.path)})

    def data(self, query: dict[str, list[str]]) -> None:
        self._send_json(self.server.runs.pack(_one(query)))

    def compare(self, query: dict[str, list[str]]) -> None:
        self._send_json(self.server.runs.compare(query.get("run", [])))

    def events(self, query: dict[str, list[str]]) -> None:
        """A stream that says `grown` whenever the run has, and `ended` when its end is recorded."""
        folder = self.server.runs.find(_one(query))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        version = query.get("since", [""])[0]  # of what the page has
        ended, rest, said = False, 0.0, time.monotonic()
        while not ended and not self.server.stopping.is_set():
            now, ended = version_of(folder), has_ended(folder)
            if now != version:
                version = now
                rest = REST * self._read_ahead(_one(query))
                self._say("grown")
                said = time.monotonic()
            elif time.monotonic() - said > QUIET:
                self._say("quiet")
                said = time.monotonic()
            if not ended:
                self.server.stopping.wait(max(LOOK_EVERY, rest))
        self._say("ended")

    def _read_ahead(self, name: str) -> float:
        """The run as the page will ask for it; how long reading took."""
        start = time.monotonic()
        self.server.runs.pack(name)
        return time.monotonic() - start

    def _say(self, event: str) -> None:
        self.wfile.write(f"event: {event}\ndata: \n\n".encode())
        self.wfile.flush()

    def _send_json(self, data: Any) -> None:
        self._send("application/json", json_line(data).encode())

    def _send(self, kind: str, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, reason: str) -> None:
        self._send("text/plain; charset=utf-8", reason.encode(), status)

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal belongs to whoever started the server."""


def _one(query: dict[str, list[str]]) -> str:
    return query.get("run", [""])[0]


ANSWERS = {
    "/": Handler.page,
    "/runs": Handler.list_runs,
    "/data": Handler.data,
    "/compare": Handler.compare,
    "/events": Handler.events,
}
