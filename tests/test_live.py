"""The page while a run grows: it follows to the end, compares, and lets nobody in who should not be."""

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from page_runs import RunMaker, Tab, open_browser, write_run

from gradproof.cli import main
from gradproof.errors import UserError
from gradproof.report.live import LiveServer, Runs, summarise, version_of


@pytest.fixture
def serve():
    """Serves a directory until the test ends."""
    servers = []

    def start(path, **options):
        server = LiveServer(Runs(path), **options)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        servers.append((server, thread))
        return server

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def browser():
    with open_browser() as found:
        yield found


def get(server, path, host=None, cookie=None):
    """Status and body of an answer; a Host header of one's own."""
    port = server.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.putrequest("GET", path, skip_host=True)
        connection.putheader("Host", host or f"127.0.0.1:{port}")
        if cookie:
            connection.putheader("Cookie", cookie)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())
    finally:
        connection.close()


# in the browser ------------------------------------------------------------------------------------------------


def test_a_growing_run_is_followed_to_its_end(browser, serve, tmp_path):
    maker = RunMaker(tmp_path / "run")
    for step in range(5):
        maker.step(step)
    tab = Tab(browser, serve(tmp_path / "run").url)
    assert "5 steps" in tab.text("header") and "live" in tab.text("header")
    assert "No end was recorded" not in tab.text("#verdict")  # it is alive: rows are fresh
    tab.page.fill("#search", "mlp")
    tab.page.click("#model summary:has-text('blocks')")
    scrolled = tab.ask("window.scrollTo(0, 1200); window.scrollY")
    for step in range(5, 9):
        maker.step(step)
    tab.page.wait_for_selector("header >> text=9 steps", timeout=10_000)
    assert tab.range() == [0, 8]
    assert tab.ask("window.scrollY") == scrolled > 0  # the reader stays where they were
    assert tab.page.locator("#model details[open]").count() == 1
    assert tab.page.input_value("#search") == "mlp" and tab.page.locator(".tensors tbody tr").count() == 2
    tab.ask("ui.view.zoomTo(2, 5)")
    maker.step(9)
    maker.end()
    tab.page.wait_for_selector("header >> text=ended", timeout=10_000)
    assert "10 steps" in tab.text("header") and tab.range() == [2, 5]
    assert tab.errors == []
    tab.page.close()


def test_runs_are_listed_chosen_and_compared(browser, serve, tmp_path):
    write_run(tmp_path / "first")
    write_run(tmp_path / "second <i>", command=["train.py", "--lr", "0.7"])
    tab = Tab(browser, serve(tmp_path).url)
    assert "second <i>" in tab.text() and tab.page.locator("main tbody tr").count() == 2
    for box in tab.page.locator("main input[type=checkbox]").all():
        box.check()
    tab.page.click("text=Compare the chosen")
    tab.page.wait_for_selector("#changes")
    assert "0.7" in tab.text("#changes") and "second <i>" in tab.text("#verdict")
    tab.page.click("#verdict button:has-text('first')")
    tab.page.wait_for_selector("#heatmap")
    assert "first" in tab.text("header")
    tab.page.click("text=← All runs")
    tab.page.wait_for_selector("#list")
    assert tab.errors == [] and all(url.startswith("http://127.0.0.1") for url in tab.requests)
    tab.page.close()


def test_a_page_behind_a_token_opens_with_it(browser, serve, tmp_path):
    write_run(tmp_path / "run", steps=3)
    tab = Tab(browser, serve(tmp_path / "run", token="auto").url)
    assert "3 steps" in tab.text("header") and "token" not in tab.page.url and tab.errors == []
    tab.page.close()


# who may ask for what ------------------------------------------------------------------------------------------


def test_another_host_name_is_refused(serve, tmp_path):
    write_run(tmp_path / "run", steps=3)
    server = serve(tmp_path)
    assert get(server, "/runs")[0] == 200
    assert get(server, "/runs", host="localhost:1")[0] == 200
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::2]", "[::1", " "):
        assert get(server, "/runs", host=host)[0] == 403


def test_nothing_outside_of_the_directory_can_be_asked_for(serve, tmp_path):
    write_run(tmp_path / "secret", steps=3)
    write_run(tmp_path / "runs" / "mine", steps=3)
    os.symlink(tmp_path / "secret", tmp_path / "runs" / "link")
    server = serve(tmp_path / "runs")
    assert get(server, "/data?run=mine")[0] == 200
    for name in ("link", "../secret", "..%2Fsecret", "mine/../../secret", "/etc", "", "mine%00"):
        status, body, _ = get(server, f"/data?run={name}")
        assert status == 404 and b"facts" not in body
    assert get(server, "/compare?run=mine&run=../secret")[0] == 404
    for path in ("/../secret/run.json", "/mine/run.json", "//etc/passwd", "/data"):
        assert get(server, path)[0] == 404
    assert b"secret" not in get(server, "/runs")[1].replace(str(tmp_path).encode(), b"")


def test_other_machines_need_a_token(serve, tmp_path):
    write_run(tmp_path / "run", steps=3)
    with pytest.raises(UserError, match="token"):
        LiveServer(Runs(tmp_path), host="0.0.0.0")
    server = serve(tmp_path, token="auto")
    assert len(server.token) >= 24 and server.token in server.url
    for path in ("/", "/runs", "/data?run=run", "/runs?token=wrong", "/runs?token="):
        assert get(server, path)[0] == 403
    status, _, headers = get(server, f"/?token={server.token}")
    assert status == 303 and headers["Location"] == "/" and "HttpOnly" in headers["Set-Cookie"]
    cookie = headers["Set-Cookie"].split(";")[0]
    assert get(server, "/runs", cookie=cookie)[0] == 200
    assert get(server, "/runs", cookie="gradproof=wrong")[0] == 403


def test_a_run_that_cannot_be_read_is_said(browser, serve, tmp_path):
    run = write_run(tmp_path / "run", steps=3)
    (run / "run.json").write_text('{"format": 1')
    server = serve(run)
    status, body, _ = get(server, "/data?run=run")
    assert status == 404 and b"is damaged" in body
    page = browser.new_page()
    page.goto(server.url)
    page.wait_for_selector("main >> text=The page could not be built: data?run=run:")
    page.close()


def test_only_reading_is_offered(serve, tmp_path):
    write_run(tmp_path / "run", steps=3)
    server = serve(tmp_path)
    for method in ("POST", "PUT", "DELETE"):
        request = urllib.request.Request(server.url + "runs", method=method, data=b"")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request)
        assert refused.value.code == 501
        refused.value.close()


def test_answers_say_how_they_may_be_used(serve, tmp_path):
    write_run(tmp_path / "run", steps=3)
    headers = get(serve(tmp_path), "/")[2]
    assert headers["X-Frame-Options"] == "DENY" and headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"


def test_serving_leaves_a_run_as_it_is(serve, tmp_path):
    run = write_run(tmp_path / "run", steps=5)
    before = {file.name: file.stat().st_mtime_ns for file in run.iterdir()}, version_of(run)
    server = serve(tmp_path)
    for path in ("/", "/runs", "/data?run=run", "/events?run=run&since=x"):
        assert get(server, path)[0] == 200
    assert ({file.name: file.stat().st_mtime_ns for file in run.iterdir()}, version_of(run)) == before


def test_a_stream_says_grown_and_ended(serve, tmp_path):
    run = write_run(tmp_path / "run", steps=5)
    server = serve(tmp_path)
    assert get(server, "/events?run=run&since=old")[1].count(b"event:") == 2
    assert get(server, f"/events?run=run&since={version_of(run)}")[1] == b"event: ended\ndata: \n\n"


def test_the_list_reads_only_the_ends_of_files(tmp_path):
    maker = RunMaker(tmp_path / "run")
    assert summarise("run", tmp_path / "run") | {"written": 0} == {
        "name": "run",
        "steps": 0,
        "loss": None,
        "written": 0,
        "ended": False,
    }
    for step in range(300):
        maker.step(step, measured=False)
    with open(tmp_path / "run" / "steps.csv", "a") as stream:
        stream.write("300,1")  # a row that is being written
    found = summarise("run", tmp_path / "run")
    assert found["steps"] == 300 and float(found["loss"]) == pytest.approx(2 / 300)


def test_live_says_what_it_cannot_do(serve, tmp_path, capsys):
    port = serve(tmp_path).server_address[1]
    assert main(["live", str(tmp_path), "--port", str(port)]) == 2
    assert "--port 0 takes a free port" in capsys.readouterr().err
    assert main(["live", str(tmp_path / "nothing")]) == 2
    assert main(["live", str(tmp_path), "--host", "0.0.0.0"]) == 2
    assert "--token" in capsys.readouterr().err


# beside a training ---------------------------------------------------------------------------------------------

TRAINING = """
import sys, time, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(30):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    if step == 20:
        print("half way", flush=True)
        sys.stdin.readline()
"""


def test_run_live_serves_while_it_trains_and_ends_with_it(tmp_path):
    (tmp_path / "train.py").write_text(TRAINING)
    command = [
        sys.executable,
        "-m",
        "gradproof",
        "run",
        "--live",
        "--no-experiments",
        "--out",
        "run",
        "train.py",
    ]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        first = process.stderr.readline()
        assert "live page at http://127.0.0.1:" in first
        address = first.split()[-1]
        assert process.stdout.readline() == "half way\n"
        assert b'"steps": 2' in urllib.request.urlopen(f"{address}runs").read()
        assert b"facts" in urllib.request.urlopen(f"{address}data?run=run").read()
        _, said = process.communicate("\n", timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0 and "page: run/report.html" in said
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{address}runs", timeout=5)


def test_the_server_ends_when_its_owner_is_gone(tmp_path):
    write_run(tmp_path / "run", steps=3)
    command = [sys.executable, "-m", "gradproof", "live", str(tmp_path), "--port", "0", "--until-stdin-ends"]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout.readline().startswith("http://127.0.0.1:")
    began = time.monotonic()
    server.stdin.close()
    assert server.wait(timeout=10) == 0 and time.monotonic() - began < 5
    server.stdout.close()


def test_one_bad_run_does_not_hide_the_others(serve, tmp_path):
    write_run(tmp_path / "good", steps=3)
    for name in ("inf", "pipe", "list", "odd", "loop", "rows"):
        write_run(tmp_path / name, steps=3)
    with open(tmp_path / "inf" / "steps.csv", "a") as stream:
        stream.write("inf" + "," * 17 + "\n")
    (tmp_path / "pipe" / "run.json").unlink()
    os.mkfifo(tmp_path / "pipe" / "run.json")
    (tmp_path / "list" / "run.json").write_text("[1]")
    (tmp_path / "loop" / "run.json").unlink()
    (tmp_path / "loop" / "run.json").symlink_to("run.json")
    (tmp_path / "rows" / "steps.csv").unlink()
    os.mkfifo(tmp_path / "rows" / "steps.csv")
    os.rename(tmp_path / "odd", os.path.join(os.fsencode(tmp_path), b"\xff\xfe\x1b[2J"))
    server = serve(tmp_path)
    status, body, _ = get(server, "/runs")
    names = {run["name"]: run["steps"] for run in json.loads(body)["runs"]}
    assert status == 200 and names["good"] == 3 and names["\\udcff\\udcfe\\x1b[2J"] == 3
    assert {"inf", "list", "rows"} <= names.keys() and not {"pipe", "loop"} & names.keys()
    assert get(server, "/data?run=" + urllib.parse.quote("\\udcff\\udcfe\\x1b[2J"))[0] == 200
    assert get(server, "/data?run=list")[0] == 404


def test_a_link_out_of_a_run_is_not_shown(serve, tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / "runs" / name, steps=3)
    (tmp_path / "letters").write_text("my letters")
    (tmp_path / "runs" / "a" / "script.py.txt").write_text("x = 1\n")
    (tmp_path / "runs" / "b" / "script.py.txt").symlink_to(tmp_path / "letters")
    status, body, _ = get(serve(tmp_path / "runs"), "/compare?run=a&run=b")
    assert status == 200 and json.loads(body)["comparison"]["code"] == ["", ""]


@pytest.mark.parametrize("token", ["a;b", "two words", "a=b&c#d%", 'quo"te', "ä"])
def test_any_token_opens(serve, tmp_path, token):
    write_run(tmp_path / "run", steps=3)
    server = serve(tmp_path, token=token)
    status, _, headers = get(server, "/" + server.url.rpartition("/")[2])
    assert status == 303 and get(server, "/runs")[0] == 403
    assert get(server, "/runs", cookie=headers["Set-Cookie"].split(";")[0])[0] == 200


def test_five_hundred_ask_at_once(serve, tmp_path):
    write_run(tmp_path / "run", steps=3)
    server = serve(tmp_path)
    with ThreadPoolExecutor(500) as pool:
        begin = threading.Barrier(500)

        def ask(number):
            begin.wait()
            return get(server, "/runs" if number % 2 else "/")[0]

        assert set(pool.map(ask, range(500))) == {200}


def test_who_does_not_ask_is_sent_away(serve, tmp_path, monkeypatch):
    monkeypatch.setattr("gradproof.report.live.TO_ASK", 0.5)
    write_run(tmp_path / "run", steps=3)
    server = serve(tmp_path)
    silent, dripping = (socket.create_connection(server.server_address[:2], timeout=10) for _ in range(2))
    began = time.monotonic()
    with pytest.raises(OSError):
        for byte in b"GET /runs HTTP/1.1\r\nX-Slow: " + b"x" * 1000:
            dripping.sendall(bytes([byte]))
            time.sleep(0.05)
    assert time.monotonic() - began < 10
    assert silent.recv(1) == b""
    assert get(server, "/runs")[0] == 200
    silent.close()
    dripping.close()


def test_there_is_room_for_so_many_and_no_more(serve, tmp_path, monkeypatch):
    monkeypatch.setattr("gradproof.report.live.MOST_CONNECTIONS", 3)
    write_run(tmp_path / "run", steps=3)
    server = serve(tmp_path)
    idle = [socket.create_connection(server.server_address[:2]) for _ in range(3)]
    patience = time.monotonic() + 10
    while get(server, "/runs")[0] != 503 and time.monotonic() < patience:
        time.sleep(0.05)
    assert get(server, "/runs")[0] == 503
    for connection in idle:
        connection.close()
    while get(server, "/runs")[0] != 200 and time.monotonic() < patience:
        time.sleep(0.05)
    assert get(server, "/runs")[0] == 200


def test_few_runs_are_kept_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("gradproof.report.live.MOST_PACKED", 2)
    for name in "abc":
        write_run(tmp_path / name, steps=3)
    runs = Runs(tmp_path)
    packed = [runs.pack(name) for name in "abc"]
    assert runs.pack("c") is packed[2] and runs.pack("b") is packed[1] and runs.pack("a") is not packed[0]


@pytest.mark.parametrize(
    "path", ["//[", "/runs?" + "&".join("a=1" for _ in range(1000)), "/data?run=%ff%00%1b"]
)
def test_what_is_no_address_gets_a_sentence(serve, tmp_path, path):
    write_run(tmp_path / "run", steps=3)
    status, body, _ = get(serve(tmp_path), path)
    assert status in (400, 404) and b"Traceback" not in body and b"\x1b" not in body
