"""gradproof in a notebook: a real kernel runs the cells, a real browser shows what came below them."""

import json
import os
import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from page_runs import open_browser, write_run
from pages import blocks_of

import gradproof
from gradproof.notebook import LARGEST_PAGE, Notebook, Verdict
from gradproof.record.source import rename_cells

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "notebooks.md"
PATIENCE = 240  # seconds for one cell
MODEL = """
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

def learn(clear=True):
    x = torch.randn(16, 4)
    if clear:
        optimizer.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()
"""


class Kernel:
    """One that runs, and what its cells gave."""

    def __init__(self, manager, client):
        self.manager, self.client = manager, client

    def run(self, code, at_output=None):
        """The outputs of a cell by kind; `at_output` is called at the first line that it prints."""
        outputs = []

        def hear(message):
            kind, content = message["msg_type"], message["content"]
            if kind in ("stream", "error", "display_data", "execute_result", "update_display_data"):
                if kind == "stream" and at_output is not None and not outputs:
                    at_output()
                outputs.append((kind, content))

        reply = self.client.execute_interactive(code, timeout=PATIENCE, output_hook=hear)
        return Cell(reply["content"], outputs)


class Cell:
    def __init__(self, reply, outputs):
        self.status, self.number = reply["status"], reply["execution_count"]
        self.printed = "".join(content["text"] for kind, content in outputs if kind == "stream")
        self.error = next((content["ename"] for kind, content in outputs if kind == "error"), None)
        self.traceback = "".join(line for kind, c in outputs if kind == "error" for line in c["traceback"])
        shown = [content["data"] for kind, content in outputs if kind.endswith("display_data")]
        self.verdicts = [data for data in shown if "text/html" in data]
        self.values = [content["data"]["text/plain"] for kind, content in outputs if kind == "execute_result"]


@contextmanager
def kernel_in(directory):
    pytest.importorskip("ipykernel", reason="ipykernel is not installed: no kernel runs the cells")
    manager_of = pytest.importorskip("jupyter_client.manager", reason="jupyter_client is not installed")
    # a socket's path must be short, whatever the temporary directory is called
    place = tempfile.mkdtemp(prefix="gp", dir="/tmp" if os.path.isdir("/tmp") else None)
    source = str(Path(gradproof.__file__).parents[1])
    environment = {**os.environ, "IPYTHONDIR": place, "JUPYTER_RUNTIME_DIR": place, "NO_COLOR": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([source, *filter(None, [environment.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager = manager_of.KernelManager(transport="ipc", connection_file=f"{place}/k.json")
    manager.kernel_spec.argv = command
    manager.start_kernel(env=environment, cwd=str(directory))
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=PATIENCE)
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        shutil.rmtree(place, ignore_errors=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def one_kernel(directory):
    with kernel_in(directory) as kernel:
        yield kernel


@pytest.fixture
def kernel(one_kernel):
    begin(one_kernel)
    return one_kernel


def begin(kernel):
    """A model of its own for every test; `kernel.cell` is the cell that it stands in."""
    assert kernel.run("%reset -f\n%load_ext gradproof").status == "ok"
    made = kernel.run(MODEL)
    assert made.status == "ok"
    kernel.cell = f"cell-{made.number}.py"


CELL = "%%gradproof --out runs/{name} --examine off\nfor step in range(12):\n    last = learn(clear={clear})\nstep"


def test_a_cell_is_watched_and_its_verdict_shown_below_it(kernel, directory):
    cell = kernel.run(CELL.format(name="a", clear=False))
    assert cell.status == "ok" and cell.values == ["11"]  # the last value is shown, as without the magic
    (verdict,) = cell.verdicts
    assert "zero-grad-error" in verdict["text/plain"]
    assert f"{kernel.cell}:" in verdict["text/plain"]  # where the function stands that the cell calls
    assert "zero-grad-error" in verdict["text/html"] and 'sandbox="allow-scripts"' in verdict["text/html"]
    assert kernel.run("step, last > 0").values == ["(11, True)"]  # its variables are the notebook's
    kept = json.loads((directory / "runs/a/run.json").read_text())
    assert kept["source"]["file"].startswith("cell-") and kernel.cell in kept["cells"].values()
    assert (directory / "runs/a/script.py.txt").read_text().startswith("%%gradproof --out runs/a")
    assert f"{kernel.cell}:" in str(gradproof.diagnose(directory / "runs/a"))  # in any other process, too


def test_the_same_cell_mended_and_run_again_is_not_accused(kernel, directory):
    cells = [kernel.run(CELL.format(name="again", clear=True)) for _ in range(2)]
    for cell in cells:
        (verdict,) = cell.verdicts
        assert "zero-grad-error" not in verdict["text/plain"] and "12 steps" in verdict["text/plain"]
        assert "Nothing is wrong" not in verdict["text/plain"]  # nothing was asked
    runs = {path.name for path in (directory / "runs").iterdir()}
    assert {"again", "again-2"} <= runs  # each its own, none written over


def test_watch_in_a_loop_shows_its_verdict(kernel, directory):
    code = (
        "import gradproof\n"
        "with gradproof.watch(model, optimizer, out='runs/loop', experiments=False) as run:\n"
        "    for step in range(8):\n        learn(clear=False)\n"
    )
    cell = kernel.run(code)
    (verdict,) = cell.verdicts
    assert "zero-grad-error" in verdict["text/plain"] and "runs/loop" in verdict["text/plain"]
    before = kernel.run("sum(len(m._forward_hooks) for m in model.modules())")
    assert before.values == ["0"]


def test_an_error_in_the_cell_stays_its_own(kernel):
    cell = kernel.run("%%gradproof --examine off\nlearn()\nlearn()\nraise ZeroDivisionError('mine')")
    assert cell.status == "error" and cell.error == "ZeroDivisionError" and len(cell.verdicts) == 1
    assert "ended after 2 steps by ZeroDivisionError" in cell.verdicts[0]["text/plain"]
    assert ":4" in cell.verdicts[0]["text/plain"]  # the line as the cell counts it
    for wrong in ("--nonsense", "--examine soon"):
        cell = kernel.run(f"%%gradproof {wrong}\nprint('it ran')")
        assert (
            cell.status == "error" and cell.printed.startswith("UsageError") and "it ran" not in cell.printed
        )


def test_an_interrupt_ends_the_training_and_the_verdict_is_shown(kernel):
    code = "%%gradproof --examine off\nimport time\nfor _ in range(5):\n    learn()\nprint('there')\ntime.sleep(3600)"
    cell = kernel.run(code, at_output=kernel.manager.interrupt_kernel)
    assert cell.error == "KeyboardInterrupt" and len(cell.verdicts) == 1
    assert "5 steps" in cell.verdicts[0]["text/plain"]
    assert kernel.run("learn() > 0").values == ["True"]  # and the kernel goes on


def test_unloaded_it_shows_nothing(kernel):
    kernel.run("%unload_ext gradproof")
    code = "with gradproof.watch(model, optimizer, out='runs/quiet', experiments=False):\n    learn()"
    cell = kernel.run("import gradproof\n" + code)
    again = kernel.run("%load_ext gradproof")
    assert cell.status == "ok" and not cell.verdicts and again.status == "ok"


def test_what_the_page_of_the_docs_shows_runs(kernel):
    blocks = [block.text for block in blocks_of(PAGE) if block.language == "python"]
    cells = [kernel.run(text.replace("%%gradproof", "%%gradproof --examine off")) for text in blocks]
    assert [cell.status for cell in cells] == ["ok"] * 3
    assert [len(cell.verdicts) for cell in cells] == [0, 1, 1]


@pytest.mark.slow
def test_a_kernel_that_is_killed_leaves_its_run(kernel, directory):
    """What was recorded until then is shown by the next one, and by any other process."""
    kernel.client.execute(
        "%%gradproof --out runs/cut --examine off\nfor step in range(5):\n    learn()\nprint('there')\nwhile True: pass"
    )
    while True:
        message = kernel.client.get_iopub_msg(timeout=PATIENCE)
        assert message["msg_type"] != "error", message["content"]
        if message["msg_type"] == "stream" and "there" in message["content"]["text"]:
            break
    kernel.manager.restart_kernel(now=True)
    kernel.client.wait_for_ready(timeout=PATIENCE)
    begin(kernel)
    assert kernel.run("import gradproof; gradproof.diagnose('runs/cut').steps").values == ["5"]
    assert len(kernel.run(CELL.format(name="anew", clear=True)).verdicts) == 1


def test_the_frame_shows_the_page_and_reaches_nothing(tmp_path):
    verdict = Verdict(write_run(tmp_path / "run"))
    file = tmp_path / "notebook.html"
    file.write_text(f"<!doctype html><meta charset=utf-8><body>{verdict._repr_html_()}</body>")
    with open_browser() as browser:
        page = browser.new_page()
        errors, asked_for = [], []
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: asked_for.append(request.url))
        page.goto(file.as_uri())
        page.locator("iframe").scroll_into_view_if_needed()
        frame = page.frame_locator("iframe")
        frame.locator("html[data-ready]").wait_for(state="attached")
        assert "40 steps recorded" in frame.locator("main").inner_text()
        assert frame.locator("html").evaluate("() => self.origin") == "null"  # no reach into the notebook
        assert not errors and asked_for == [file.as_uri()]


def test_a_page_too_large_for_a_notebook_is_named(tmp_path):
    verdict = Verdict(write_run(tmp_path / "run"))
    assert "<iframe" in verdict._repr_html_()
    verdict.page = "x" * (LARGEST_PAGE + 1)
    said = verdict._repr_html_()
    assert "<iframe" not in said and "gradproof report" in said


def test_progress_gives_way_to_the_verdict(monkeypatch, tmp_path):
    display = pytest.importorskip("IPython.display", reason="IPython is not installed")
    shown = []

    class Handle:
        def update(self, what):
            shown.append(("again", what))

    def show(what, display_id):
        shown.append(("new", what))
        return Handle()

    monkeypatch.setattr(display, "display", show)
    notebook = Notebook(shell=None)
    notebook.examines({"asked": 3, "left": 5})
    notebook.ended(write_run(tmp_path / "run"))
    assert [how for how, _ in shown] == ["new", "again"] and isinstance(shown[1][1], Verdict)
    assert "3 of 8" in repr(shown[0][1])


def test_what_cannot_be_shown_is_one_warning(tmp_path):
    with pytest.warns(UserWarning, match="could not show its verdict"):
        Notebook(shell=None).ended(tmp_path / "no run")


def test_only_places_in_cells_are_renamed():
    cells = {"12.py": "cell-3.py"}
    assert rename_cells("at /tmp/ipykernel_1/12.py:5 in f", cells) == "at cell-3.py:5 in f"
    assert rename_cells("(12.py:5), 112.py:5, 12.py", cells) == "(cell-3.py:5), 112.py:5, 12.py"


def test_importing_gradproof_imports_no_notebook():
    import subprocess

    code = "import gradproof, sys; sys.exit('IPython' in sys.modules or 'gradproof.notebook' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
