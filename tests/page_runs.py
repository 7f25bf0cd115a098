"""Small runs for the tests of the page, written without training; and a browser to look at them."""

import shutil
import time
from contextlib import contextmanager

import numpy as np
import pytest

from gradproof.record.schema import (
    DISTRIBUTION_FRAME,
    EXPONENT_BINS,
    PERCENTILES,
    STATISTICS,
    STATISTICS_FRAME,
)
from gradproof.record.writer import RunWriter

COLUMN = {name: place for place, name in enumerate(STATISTICS)}
LAYERS = ("embed", "blocks.0.attention", "blocks.0.mlp", "blocks.1.attention", "blocks.1.mlp", "head")
ARGUMENTS = [
    *("--no-sandbox", "--headless", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


class RunMaker:
    """Writes a run step by step; `layers` names its modules."""

    def __init__(self, path, layers=LAYERS, **info):
        self.layers = layers
        facts = {
            "command": ["train.py", "--lr", "0.1"],
            "directory": "/home/someone",
            "began": time.time() - 100,
            "versions": {"torch": "2.0"},
            "optimizers": [{"name": "optimizer", "class": "Adam", "groups": [{"lr": 0.1, "eps": 1e-8}]}],
            "parameters": [
                {"name": f"{layer}.weight", "shape": [8, 8], "dtype": "float32", "trainable": True}
                | {"optimizer": 0, "gradient": True, "changed": True}
                for layer in layers
            ],
        }
        self.writer = RunWriter(path, {**facts, **info})
        kinds = ("output", "output_gradient", "gradient", "weight", "update", "adam_m", "adam_v")
        self.keys = [
            (kind, layer if kind.startswith("output") else f"{layer}.weight")
            for kind in kinds
            for layer in layers
        ]
        self.numbers = np.array(
            [self.writer.add_tensor(kind, name, shape=[8, 8]) for kind, name in self.keys]
        )

    def step(self, step, loss=None, norms=1.0, nan_in=(), measured=True, **row):
        """One step; every tensor's norm is `norms` times its place, `nan_in` names keys that hold a NaN."""
        if measured:
            values = np.zeros((len(self.keys), len(STATISTICS)))
            size = norms * (1.0 + np.arange(len(self.keys)))
            for name, share in (("norm", 1.0), ("absmax", 0.5), ("std", 0.1), ("mean", 0.01), ("max", 0.5)):
                values[:, COLUMN[name]] = share * size
            values[:, COLUMN["cosine"]] = np.nan
            for key in nan_in:
                values[self.keys.index(key), COLUMN["nan"]] = 3
            self.writer.write_frame(STATISTICS_FRAME, step, self.numbers, values)
        facts = {"seconds": 0.1 * step, "optimizer": 0, "lr": 0.1, "grad_norm": 0.8, "backwards": 1}
        facts |= {"norm_before_clip": 1.2, "clip_limit": 1.0, "weight_norm": 9.0, "update_norm": 0.01}
        loss = 2.0 / (1 + step) if loss is None else loss
        self.writer.write_step({"step": step, "loss": loss, "depth": 4, "order": "zbcs", **facts, **row})

    def distributions(self, step):
        counts = np.zeros((len(self.keys), EXPONENT_BINS))
        counts[:, 38:42] = 25
        spread = np.linspace(-1, 1, len(PERCENTILES)) * np.ones((len(self.keys), 1))
        self.writer.write_frame(DISTRIBUTION_FRAME, step, self.numbers, np.hstack([spread, counts]))

    def end(self):
        self.writer.set_info(ended=time.time(), exit_code=0)
        self.writer.close()
        return self.writer.path


def write_run(path, steps=40, **info):
    """A healthy run that explodes nowhere: loss 2/(1+step), norms falling slowly."""
    maker = RunMaker(path, **info)
    for step in range(steps):
        maker.step(step, norms=1 / (1 + 0.1 * step))
    maker.distributions(0)
    maker.distributions(steps - 1)
    return maker.end()


def find_chromium():
    """Debian's chromium or a relative of it; skips, saying why, where there is none."""
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed: no browser tests")
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(names)} is installed")
    return found


@contextmanager
def open_browser():
    path = find_chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


class Tab:
    """A page that remembers what went wrong in it and what it asked the network for."""

    def __init__(self, browser, address, width=1280, height=900, scheme="light"):
        self.page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.errors, self.requests = [], []
        self.page.on(
            "console", lambda m: self.errors.append(m.text) if m.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)
        self.page.wait_for_selector("html[data-ready]", timeout=15_000)

    def text(self, selector="main"):
        return self.page.inner_text(selector)

    def range(self):
        return self.page.evaluate("ui.view.range")

    def ask(self, script):
        return self.page.evaluate(script)
