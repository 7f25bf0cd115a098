"""The pictures in the docs, of real runs:

GRADPROOF_PICTURES=docs/images pytest tests/test_pictures.py
"""

import os
import shutil
from pathlib import Path

import pytest
from page_runs import Tab, open_browser

from gradproof.cli import main
from gradproof.faults.catalogue import FAULTS, plant

LARGEST = 200_000  # bytes of a picture


def train(folder, fault, name, *options):
    """A planted fault, watched; the run directory."""
    found = next(each for each in FAULTS if each.name == fault)
    script = folder / f"{found.script}.py"
    script.write_text(plant(found))
    assert main(["run", "--quiet", *options, "--out", str(folder / name), str(script)]) == 0
    return folder / name


@pytest.mark.slow
def test_pictures_for_the_docs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrong = train(tmp_path, "custom_ops_autoencoder-gelu-sign", "autoencoder", "--verify")
    schedule = ("--schedule", "all every 3rd step")
    growing = train(tmp_path, "deep_residual-residual-growth", "residual", *schedule)
    fixed = tmp_path / "autoencoder.autograd"
    assert main(["report", str(wrong), str(fixed), "-o", str(tmp_path / "compared.html")]) == 0
    with open_browser() as browser:
        take(browser, wrong / "report.html", "verdict", "light")
        take(browser, wrong / "report.html", "curves", "dark", "#curves")
        take(browser, growing / "report.html", "heatmap", "dark", "#heatmap")
        take(browser, tmp_path / "compared.html", "compare", "light")
        take(browser, growing / "report.html", "phone", "light", width=390, height=844)
    for picture in tmp_path.glob("*.png"):
        assert 10_000 < picture.stat().st_size < LARGEST, picture.name
    if target := os.environ.get("GRADPROOF_PICTURES"):
        folder = Path(__file__).parent.parent / target
        folder.mkdir(parents=True, exist_ok=True)
        for picture in tmp_path.glob("*.png"):
            shutil.copy(picture, folder)


def take(browser, file, name, scheme, part=None, **size):
    tab = Tab(browser, file.as_uri(), scheme=scheme, **size)
    if part == "#heatmap":
        tab.page.select_option("#heatmap select", "output")
    if part:
        tab.ask(f"document.querySelector('{part}').scrollIntoView()")
    tab.page.wait_for_timeout(300)
    assert str(file.parent) not in tab.text("#verdict")
    tab.page.screenshot(path=f"{name}.png")
    assert tab.errors == []
    tab.page.close()
