"""What the page costs at 1,000 tensors × 20,000 steps: making the report, opening it, zooming in it, following a run.

    python benchmarks/page.py [--steps 20000] [--tensors 1000]

The run is synthetic (every statistic of every tensor at every step, 1 GB), the page is opened in Chromium.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from gradproof.record.schema import (
    DISTRIBUTION_FRAME,
    EXPONENT_BINS,
    KINDS,
    PERCENTILES,
    STATISTICS,
    STATISTICS_FRAME,
)
from gradproof.record.writer import RunWriter

OF_A_BLOCK = ("norm1", "attention.qkv", "attention.out", "norm2", "mlp.up", "mlp.gelu", "mlp.down")


def write_large_run(path: Path, tensors: int = 1000, steps: int = 20_000, seed: int = 0) -> Path:
    """A run that trains for a while, spikes at three quarters, and recovers; one tensor has a NaN for ten steps."""
    rng = np.random.default_rng(seed)
    info = {
        "command": ["synthetic.py"],
        "began": time.time() - steps,
        "ended": time.time(),
        "versions": {"gradproof": "benchmark"},
    }
    per_kind = math.ceil(tensors / len(KINDS))
    names = [f"blocks.{i // len(OF_A_BLOCK)}.{OF_A_BLOCK[i % len(OF_A_BLOCK)]}" for i in range(per_kind)]
    keys = [(kind, name) for kind in KINDS for name in names][:tensors]
    facts = {"shape": [256, 256], "dtype": "float32", "trainable": True, "optimizer": 0, "gradient": True}
    info["parameters"] = [{"name": f"{name}.weight", **facts} for name in names]
    writer = RunWriter(path, info)
    numbers = np.array(
        [
            writer.add_tensor(kind, name if kind.startswith("output") else f"{name}.weight", shape=[256, 256])
            for kind, name in keys
        ]
    )
    level = rng.normal(0, 2, (tensors, 1))
    column = {name: place for place, name in enumerate(STATISTICS)}
    values = np.zeros((tensors, len(STATISTICS)))
    for step in range(steps):
        swell = 6 * math.exp(-(((step - 0.75 * steps) / (0.02 * steps)) ** 2))
        norm = np.exp(level[:, 0] - step / steps + swell + 0.2 * rng.standard_normal(tensors))
        values[:] = norm[:, None] / 256
        values[:, column["norm"]] = norm
        values[:, column["absmax"]] = norm / 50
        values[:, [column["nan"], column["inf"], column["zero"], column["subnormal"]]] = 0
        values[:, [column["cosine"], column["eps_share"], column["dead"]]] = 0.01
        if 0.8 * steps <= step < 0.8 * steps + 10:
            values[tensors // 3, column["nan"]] = 7
        writer.write_frame(STATISTICS_FRAME, step, numbers, values)
        if step % max(1, steps // 40) == 0:
            counts = rng.poisson(20, (tensors, EXPONENT_BINS)) * (np.arange(EXPONENT_BINS) % 40 > 20)
            spread = np.sort(rng.normal(0, 1, (tensors, len(PERCENTILES))), axis=1)
            writer.write_frame(DISTRIBUTION_FRAME, step, numbers, np.hstack([spread, counts]))
        loss = 4 * math.exp(-3 * step / steps) + 0.1 * rng.standard_normal() + 0.2 * swell
        before = float(np.exp(0.3 * rng.standard_normal() + swell))
        writer.write_step(
            {
                "step": step,
                "seconds": 0.5 * step,
                "optimizer": 0,
                "loss": loss,
                "lr": 3e-4 * min(1, step / 200),
                "norm_before_clip": before,
                "clip_limit": 1.0,
                "grad_norm": min(before, 1.0),
                "weight_norm": 80.0,
                "update_norm": 0.02,
                "backwards": 1,
                "depth": 4,
                "order": "zbcs",
            }
        )
    writer.close()
    return writer.path


def measure_report(run: Path, out: Path) -> dict[str, float]:
    """`gradproof report` in a process of its own: seconds of its CPU, peak memory, size of the file."""
    code = (
        "import resource, sys, time\n"
        "from gradproof.cli import main\n"
        f"assert main(['report', {str(run)!r}, '-o', {str(out)!r}]) == 0\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "peak = [l for l in open('/proc/self/status') if l.startswith('VmHWM')]\n"  # maxrss is the parent's, too
        "print(used.ru_utime + used.ru_stime, int(peak[0].split()[1]) / 1024, 'torch' in sys.modules)"
    )
    begin = time.perf_counter()
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    wall = time.perf_counter() - begin
    seconds, megabytes, torch = answer.stdout.splitlines()[-1].split()
    assert torch == "False"
    return {
        "seconds": float(seconds),
        "wall_seconds": wall,
        "megabytes": float(megabytes),
        "file_megabytes": out.stat().st_size / 1e6,
    }


def measure_page(browser: Any, file: Path) -> dict[str, Any]:
    """Opening the page, and the median of 20 zooms with everything drawn anew, in a browser."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(file.as_uri())
    page.wait_for_selector("html[data-ready]")
    interactive = page.evaluate("ready.interactive")
    zooms = page.evaluate(
        """() => {
            const times = [];
            for (let i = 0; i < 20; i++) {
                const begin = performance.now();
                ui.view.zoomBy(i % 10 < 5 ? 0.6 : 1 / 0.6);
                document.body.getBoundingClientRect();
                times.push(performance.now() - begin);
            }
            return times.sort((a, b) => a - b);
        }"""
    )
    page.close()
    return {
        "interactive_seconds": interactive / 1000,
        "zoom_milliseconds": zooms[10],
        "slowest_zoom_milliseconds": zooms[-1],
        "errors": errors,
    }


TRAINING = """
import sys, time, numpy as np
sys.path.insert(0, {tests!r})
from page_runs import RunMaker
maker, begin = RunMaker({run!r}), time.process_time()
pause = time.sleep
for step in range(400):
    maker.step(step)
    a = np.random.rand(160, 160)
    for _ in range(4): a = a @ a / 160
    pause(0.002)
print(time.process_time() - begin)
"""


def measure_following(directory: Path, rounds: int = 5) -> tuple[float, float]:
    """CPU time of a process that writes 400 steps over the same once more: with the page following it, and without."""
    tests = str(Path(__file__).parent.parent / "tests")
    variants = ("plain", "followed", "plain again")
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    for number in range(rounds):
        for variant in variants[number % 3 :] + variants[: number % 3]:
            run = directory / f"{variant} {number}"
            code = TRAINING.format(tests=tests, run=str(run))
            training = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
            reader = follow(run) if variant == "followed" else None
            out, _ = training.communicate()
            seconds[variant].append(float(out))
            if reader:
                reader.kill()
                reader.wait()
    plain, followed, again = (float(np.median(seconds[variant])) for variant in variants)
    return followed / plain, again / plain


def follow(run: Path) -> subprocess.Popen:
    """A reader that asks for the run as a page does: a server, and its stream of events read to the end."""
    code = (
        "import threading, time, urllib.request\nfrom pathlib import Path\n"
        "from gradproof.report.live import LiveServer, Runs\n"
        f"while not (Path({str(run)!r}) / 'run.json').exists(): time.sleep(0.01)\n"
        f"server = LiveServer(Runs({str(run)!r}))\n"
        "threading.Thread(target=server.serve_forever, daemon=True).start()\n"
        f"urllib.request.urlopen(server.url + 'events?run={quote(run.name)}').read()\n"
    )
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--tensors", type=int, default=1000)
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from page_runs import open_browser

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        run = write_large_run(place / "large", args.tensors, args.steps)
        size = sum(file.stat().st_size for file in run.iterdir()) / 1e9
        print(f"{args.tensors} tensors × {args.steps} steps, {size:.2f} GB on disk")
        made = measure_report(run, place / "large.html")
        print(
            f"report             {made['seconds']:.1f} s of CPU, {made['wall_seconds']:.1f} s wall  (bar 20)"
        )
        print(f"peak memory        {made['megabytes']:.0f} MB  (bar 500)")
        print(f"file               {made['file_megabytes']:.2f} MB  (bar 2)")
        with open_browser() as browser:
            shown = measure_page(browser, place / "large.html")
        print(f"interactive after  {shown['interactive_seconds']:.2f} s  (bar 2)")
        zoom, worst = shown["zoom_milliseconds"], shown["slowest_zoom_milliseconds"]
        print(f"a zoom             {zoom:.0f} ms, the slowest of 20 {worst:.0f} ms  (bar 100)")
        followed, again = measure_following(place)
        print(f"training followed  {followed:.3f} × its CPU time; not followed, once more {again:.3f}")


if __name__ == "__main__":
    main()
