"""The page while a run grows: it follows to the end, compares, and lets nobody in who should not be."""

import http.client
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

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


def test_live_says_what_it_cannot_do(tmp_path, capsys):
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
