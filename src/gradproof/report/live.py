"""Serves the page while a run grows. Only reads files: the training process does not know of it.

Loopback only, unless a token guards it. What is asked for is a run of the served directory, by a name that the
directory itself lists: no path comes from outside.
"""

from __future__ import annotations

import hashlib
import hmac
import http.cookies
import io
import math
import os
import secrets
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from gradproof.diagnosis.ranking import diagnose
from gradproof.errors import UserError, plain
from gradproof.files import has_file, open_file
from gradproof.record.door import Damaged, read_json, whole
from gradproof.record.schema import (
    EVENTS_FILE,
    EXAMINATION_FILE,
    FRAMES_FILE,
    INFO_FILE,
    STEPS_FILE,
    json_line,
)
from gradproof.record.whole import open_whole
from gradproof.report.html import pack_runs, render_live_page
from gradproof.report.payload import pack_run

LOOPBACK = ("127.0.0.1", "localhost", "::1")
COOKIE = "gradproof"
LOOK_EVERY = 0.5  # seconds between two looks at the sizes of a run's files
REST = 4  # times what reading a run took until it is read again: a large one must not keep a core busy
TAIL = 4096  # bytes from the end of steps.csv that hold its last row
QUIET = 60.0  # seconds without a word after which a stream says that it is still there
MOST_COMPARED = 8
BACKLOG = 512  # connections that wait to be taken
MOST_CONNECTIONS = 1024  # at a time, a thread each; who comes after them is told so
MOST_PACKED = 16  # runs that are kept as the page wants them, a megabyte or two each
READERS = 2  # that read runs at a time: each needs memory, and a core
TO_ASK = 20.0  # seconds within which a client has to have asked, the next time too
TO_TAKE = 60.0  # seconds within which it has to take the answer
MOST_FIELDS = 32  # of a query
LONGEST_CELL = 32


class Runs:
    """The runs of a directory, or the one run that the directory is."""

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise UserError(
                f"there is no directory {self.path}; `gradproof run train.py` makes runs under runs/"
            )
        self.only = plain(self.path.name) or "run" if os.path.lexists(self.path / INFO_FILE) else None
        self._packed: dict[str, dict[str, str]] = {}  # the last ones asked for
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        self._reading = threading.Semaphore(READERS)

    def find(self, name: str) -> Path:
        """The directory of a run; only names that are really there are known."""
        found = self.directories().get(name)
        if found is None:
            raise UserError(f"there is no run {name!r} here; the first page lists them")
        return found

    def directories(self) -> dict[str, Path]:
        """By name as it can be shown: every run here; `gradproof train` has its own one level below, at NAME/record."""
        if self.only:
            return {self.only: self.path}
        files = [*self.path.glob(f"*/{INFO_FILE}"), *self.path.glob(f"*/record/{INFO_FILE}")]
        inside = self.path.resolve()
        # no link leads out
        folders = [file.parent for file in files if has_file(file) and leads_to(file).is_relative_to(inside)]
        return {plain(folder.relative_to(self.path).as_posix()): folder for folder in folders}

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
            kept = self._packed.pop(name, None)
            if kept is None or kept["version"] != version:
                with self._reading:
                    kept = {**pack_run(open_whole(folder)), "version": version}
            with self._lock:
                self._packed[name] = kept
                while len(self._packed) > MOST_PACKED:
                    del self._packed[next(iter(self._packed))]
            return kept

    def compare(self, names: list[str]) -> dict[str, Any]:
        if not 2 <= len(names) <= MOST_COMPARED:
            raise UserError(f"2 to {MOST_COMPARED} runs can be compared, not {len(names)}")
        with self._reading:
            runs = [open_whole(self.find(name)) for name in names]
            return pack_runs(runs, [diagnose(run) for run in runs])


def leads_to(path: Path) -> Path:
    """Where a path really is; nowhere, if its links go round in a circle."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return Path("/dev/null")


def version_of(folder: Path) -> str:
    """A word that changes when a run's files do."""
    found = []
    for name in (STEPS_FILE, FRAMES_FILE, EVENTS_FILE, EXAMINATION_FILE, INFO_FILE):
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
        with open_file(folder / STEPS_FILE) as stream:
            columns = stream.readline(TAIL).decode("utf-8", "replace").strip().split(",")
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - TAIL))
            rows = stream.read().decode("utf-8", "replace").split("\n")[:-1]  # whole rows only
            written = os.fstat(stream.fileno()).st_mtime
        last = rows[-1].split(",") if rows else []
        if len(last) == len(columns) and last != columns:
            row = dict(zip(columns, last, strict=True))
            steps, loss = whole(int(float(row["step"]))) + 1, _shown(row.get("loss", ""))
    except (OSError, ValueError, KeyError, OverflowError):  # one bad run is no reason not to list the others
        pass
    return {"name": name, "steps": steps, "loss": loss, "written": written, "ended": has_ended(folder)}


def _shown(cell: str) -> str | None:
    """A number of steps.csv, as it stands there."""
    if not cell or len(cell) > LONGEST_CELL:
        return None
    float(cell)  # else it is no number
    return cell


def has_ended(folder: Path) -> bool:
    try:
        info = read_json(folder / INFO_FILE)
    except (OSError, Damaged):
        return False
    return isinstance(info, dict) and bool(info.get("ended"))


class LiveServer(ThreadingHTTPServer):
    """Serves runs at an address; without a token only to this machine."""

    daemon_threads = True
    request_queue_size = BACKLOG

    def __init__(self, runs: Runs, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> None:
        if host not in LOOPBACK and not token:
            raise UserError(
                f"{host} can be reached from other machines: give a token (--token auto makes one), "
                "or leave --host away to serve this machine only"
            )
        self.runs = runs
        self.token = secrets.token_urlsafe(24) if token == "auto" else token
        self.secret = (
            hashlib.sha256(self.token.encode()).hexdigest() if self.token else ""
        )  # fits into a cookie
        self.stopping = threading.Event()
        self._places = threading.Semaphore(MOST_CONNECTIONS)
        try:
            super().__init__((host, port), Handler)
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"cannot serve at {host}:{port}: {reason}; --port 0 takes a free port") from None

    @property
    def url(self) -> str:
        """What to open in a browser."""
        host, port = self.server_address[0], self.server_address[1]
        query = f"?token={quote(self.token, safe='')}" if self.token else ""
        return f"http://{host if isinstance(host, str) else host.decode()}:{port}/{query}"

    def knows_host(self, header: str | None) -> bool:
        """The Host that a browser names is this server's: no foreign site's name has been pointed at it."""
        try:
            name = urlsplit(f"//{header or ''}").hostname
        except ValueError:
            return False
        return name in (*LOOPBACK, str(self.server_address[0]).lower()) or bool(self.token and name)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        try:
            request.settimeout(1.0)
            request.sendall(
                b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
            )
        except OSError:
            pass
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def shutdown(self) -> None:
        self.stopping.set()
        super().shutdown()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closes its tab is no error."""


class Patience(io.RawIOBase):
    """Reads from a client until its time is over: one that drips a byte now and then does not hold a thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.deadline = math.inf

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the client took too long to ask")
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class Handler(BaseHTTPRequestHandler):
    """GET only, five addresses."""

    server: LiveServer
    protocol_version = "HTTP/1.1"
    _answered = False  # a stream has begun: nothing else can be said in its place

    def setup(self) -> None:
        super().setup()
        self._patience = Patience(self.connection)
        self.rfile = io.BufferedReader(self._patience)

    def handle_one_request(self) -> None:
        self._patience.deadline = time.monotonic() + TO_ASK
        super().handle_one_request()

    def do_GET(self) -> None:
        self.connection.settimeout(TO_TAKE)
        try:
            address = urlsplit(self.path)
            query = parse_qs(address.query, max_num_fields=MOST_FIELDS)
        except ValueError:
            return self._refuse(400, "this is no address")
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
        except (ConnectionError, TimeoutError):  # the client is gone, or does not take its answer
            self.close_connection = True
        except Exception as error:  # the page says it
            if self._answered:
                self.close_connection = True
            else:
                self._refuse(500, f"{type(error).__name__}: {error}")

    def _may_read(self, query: dict[str, list[str]]) -> bool:
        token = self.server.token
        if not token:
            return True
        cookie = http.cookies.SimpleCookie()
        try:
            cookie.load(self.headers.get("Cookie", ""))
        except http.cookies.CookieError:
            return False
        secrets_given = [cookie[COOKIE].value] if COOKIE in cookie else []
        secrets_given += [hashlib.sha256(each.encode()).hexdigest() for each in query.get("token", [])]
        return any(hmac.compare_digest(each.encode(), self.server.secret.encode()) for each in secrets_given)

    def _remember_token(self) -> None:
        """Into a cookie and out of the address bar."""
        self.send_response(303)
        self.send_header("Location", "/")
        self.send_header("Set-Cookie", f"{COOKIE}={self.server.secret}; HttpOnly; SameSite=Strict; Path=/")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def page(self, query: dict[str, list[str]]) -> None:
        self._send("text/html; charset=utf-8", render_live_page(self.server.runs.only).encode())

    def list_runs(self, query: dict[str, list[str]]) -> None:
        self._send_json(
            {"runs": self.server.runs.summaries(), "directory": plain(str(self.server.runs.path))}
        )

    def data(self, query: dict[str, list[str]]) -> None:
        self._send_json(self.server.runs.pack(_one(query)))

    def compare(self, query: dict[str, list[str]]) -> None:
        self._send_json(self.server.runs.compare(query.get("run", [])))

    def events(self, query: dict[str, list[str]]) -> None:
        """A stream that says `grown` whenever the run has, and `ended` when its end is recorded."""
        folder = self.server.runs.find(_one(query))
        self._answered = True
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
        self.connection.settimeout(TO_TAKE)
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
        self._send("text/plain; charset=utf-8", plain(reason, lines=True).encode(), status)

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
