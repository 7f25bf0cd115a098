"""Draws the picture of each page in docs/instruments, from what its instrument measures on these pages' trainings.

    python docs/make_pictures.py [NAME ...]

A training stands on its page, as `small.py` does on the first; what is drawn beside it is the same training with one
slip planted. Writes docs/images/instruments/NAME.svg.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import draw

DOCS = Path(__file__).parent
PICTURES = DOCS / "images" / "instruments"
AS_IT_IS = "as it is"


class Workshop:
    """A directory in which the trainings of the pages are run, each once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._runs: dict[tuple[str, str], Path] = {}

    def record(self, page: str, script: str, edits: dict[str, str] | None = None, name: str = "") -> Path:
        """The run of a script that a page shows, with some of its text exchanged."""
        if (script, name) not in self._runs:
            source = shown_on(page, script)
            for old, new in (edits or {}).items():
                assert source.count(old) == 1, f"{script} has not exactly one {old!r}"
                source = source.replace(old, new)
            file = self.directory / f"{name or 'plain'}_{script}"
            file.write_text(source)
            run = self.directory / f"run_{file.stem}"
            words = ["run", "--quiet", "--examine", "off", "--out", str(run), str(file)]
            subprocess.run([sys.executable, "-m", "gradproof", *words], check=True, cwd=self.directory)
            self._runs[(script, name)] = run
        return self._runs[(script, name)]

    def steps(self, run: Path) -> list:
        """What was recorded of a run, as instruments want it."""
        from gradproof.instruments.evidence import Evidence
        from gradproof.tape.specimen import load

        return [Evidence(load(path)) for path in sorted((run / "specimens").glob("step-*"))]

    def small(self, edits: dict[str, str] | None = None, name: str = ""):
        """The fourth step of the training on the first page."""
        return next(e for e in self.steps(self.record("index", "small.py", edits, name)) if e.step >= 3)


def shown_on(page: str, script: str) -> str:
    """A script as its page shows it."""
    text = (DOCS / "instruments" / f"{page}.md").read_text()
    found = re.search(rf'^```python title="{re.escape(script)}"\n(.*?)^```$', text, re.M | re.S)
    assert found, f"{page}.md shows no {script}"
    return found[1]


# one function a picture -------------------------------------------------------------------------------------


def hearing(shop: Workshop) -> Iterator[draw.Panel]:
    from gradproof.instruments.hearing import who_hears_whom

    both_ways = {
        "nn.GRU(4, 16, batch_first=True), nn.Linear(16, 2)": "nn.GRU(4, 16, batch_first=True, bidirectional=True), "
        "nn.Linear(32, 2)"
    }
    for title, edits, name in ((AS_IT_IS, {}, ""), ("with bidirectional=True", both_ways, "both")):
        heard = who_hears_whom(shop.small(edits, name), axis=1, end_axis=1)
        yield draw.draw_heat(heard.sqrt().tolist(), title, "prediction at time", "input changed at time")


def rows(shop: Workshop) -> Iterator[draw.Panel]:
    from gradproof.instruments.rows import rows_behind

    strangers = {"prediction, wanted[rows])": "prediction, wanted[torch.randperm(300)[:10]])"}
    for title, edits, name in ((AS_IT_IS, {}, ""), ("targets of other rows", strangers, "rows")):
        evidence = shop.small(edits, name)
        (given,), (comparison,) = evidence.flow.inputs, evidence.flow.comparisons
        here, there = (
            next(iter(rows_behind(evidence, slot).values())).tolist() for slot in (given, comparison.target)
        )
        yield draw.draw_dots(here, there, title, "row of the input", "row of its target")


def weights(shop: Workshop) -> Iterator[draw.Panel]:
    from gradproof.instruments.weights import pull

    loud = {
        "wanted = torch.randn(300, 8, 4), torch.randn(300, 8, 2)": "wanted = torch.randn(300, 8, 4), "
        "torch.randn(300, 8, 2)\nwanted[::4] *= 30"
    }
    for title, edits, name in (
        (AS_IT_IS, {}, ""),
        ("one target in four thirty times too large", loud, "loud"),
    ):
        evidence = shop.small(edits, name)
        share = pull(evidence, evidence.flow.comparisons[0].prediction).abs().sum((1, 2))
        bars = [(str(n), float(s)) for n, s in enumerate(share / share.sum())]
        yield draw.draw_bars(bars, title, "sample", "share of the gradient")


def update(shop: Workshop) -> Iterator[draw.Panel]:
    from gradproof.ask.update import step_in_float64
    from gradproof.instruments.update import at_work, named_parameters

    coarse = {
        "torch.randn(300, 8, 2)": "torch.randn(300, 8, 2)\ndata, wanted = data.bfloat16(), wanted.bfloat16()",
        "model = Reader()": "model = Reader().bfloat16()",
    }
    for title, edits, name in ((AS_IT_IS, {}, ""), ("weights in bfloat16", coarse, "coarse")):
        evidence = shop.small(edits, name)
        (optimizer,) = at_work(evidence)
        parameter = named_parameters(evidence)["rnn.weight_hh_l0"]
        (slot,) = (s for s in evidence.updates if evidence.slot(s).name == "rnn.weight_hh_l0")
        right = step_in_float64(optimizer, optimizer.param_groups[0], parameter, evidence, slot)
        few = slice(None, None, 4)
        says, made = (change.double().flatten()[few].tolist() for change in (right, evidence.updates[slot]))
        yield draw.draw_dots(says, made, title, "change by the rule, in float64", "change that was made")


def arms(shop: Workshop) -> Iterator[draw.Panel]:
    from gradproof.instruments.arms import find_handling, train

    evidence = shop.small()
    handling = find_handling(evidence)
    lengths = [1, 4, 8, 16, 24, 32, 48]
    lines = [
        (
            f"{rate:g} × the rate",
            lengths,
            [train(evidence, handling, steps=length, rate=rate) for length in lengths],
        )
        for rate in (0.1, 1.0, 10.0)
    ]
    yield draw.draw_lines(lines, "one batch, from the weights of one step", "steps", "loss")


def digits(shop: Workshop) -> Iterator[draw.Panel]:
    from gradproof.instruments.digits import against_float64

    far = {"self.rnn(x)[0]": "self.rnn(x + 3000 - 3000)[0]"}
    lines = []
    for title, edits, name in ((AS_IT_IS, {}, ""), ("x + 3000 - 3000", far, "far")):
        evidence = shop.small(edits, name)
        slots = [slot for op in evidence.flow.operations for slot in op.makes]
        slots = [slot for slot in slots if evidence.slot(slot).dtype.is_floating_point]
        found = against_float64(evidence, slots).values()
        lost = [float((here - true).abs().max() / true.abs().max().clamp(min=1e-30)) for here, true in found]
        inexact = [(place, share) for place, share in enumerate(lost) if share > 0]  # views lose nothing
        lines.append((title, *zip(*inexact, strict=True)))
    across, up = "operation of the forward pass", "off, of the largest"
    yield draw.draw_lines(lines, "against float64", across, up, decades=True)


def fed(shop: Workshop) -> Iterator[draw.Panel]:
    from gradproof.instruments.rows import rows_behind

    half = {"torch.randperm(300)[:10]": "torch.randperm(150)[:10]"}
    for title, edits, name in ((AS_IT_IS, {}, ""), ("drawn from half of the table", half, "half")):
        drawn = []
        for evidence in shop.steps(shop.record("index", "small.py", edits, name)):
            found = rows_behind(evidence, evidence.flow.inputs[0])
            drawn += [(evidence.step, row) for numbers in found.values() for row in numbers.tolist()]
        steps, numbers = zip(*drawn, strict=True)
        yield draw.draw_dots(steps, numbers, title, "step", "row of the data", within=(0, 300))


def order(shop: Workshop) -> Iterator[draw.Panel]:
    import torch

    from gradproof.instruments.order import ties

    torch.manual_seed(0)
    waves = torch.sin(torch.arange(12) * torch.rand(64, 5, 1) + 6 * torch.rand(64, 5, 1))
    for title, batch in (
        ("view(64, 12, 5)", waves.view(64, 12, 5)),
        ("transpose(1, 2)", waves.transpose(1, 2)),
    ):
        known = ties(batch.contiguous(), 1).nan_to_num().tolist()
        line = ("", list(range(len(known))), known)
        yield draw.draw_lines(
            [line], title, "number of a sample, as it lies", "what it knows of the next one"
        )


def registration(shop: Workshop) -> Iterator[draw.Panel]:
    import torch

    from gradproof.instruments.registration import centred

    torch.manual_seed(0)
    y, x = torch.arange(20)[:, None], torch.arange(20)
    mask = ((y - 11) ** 2 + (x - 8) ** 2 < 16).double()
    image = mask + 0.2 * torch.randn(20, 20)
    for title, seen in (("as it lies", image), ("shifted by 3 and -2", image.roll((3, -2), (0, 1)))):
        spectrum = torch.fft.rfft2(centred(seen)) * torch.fft.rfft2(centred(mask)).conj()
        fits = torch.fft.irfft2(spectrum, s=(20, 20)).clamp(min=0).roll((10, 10), (0, 1))
        yield draw.draw_heat(
            fits.tolist(), title, "moved to the right by so many, less 10", "moved down by, less 10"
        )


def volume(shop: Workshop) -> Iterator[draw.Panel]:
    from gradproof.instruments.volume import find_stretches

    right = {", -s.sum(1)": ", s.sum(1)"}
    for title, edits, name in (("returns -s.sum(1)", {}, ""), ("returns s.sum(1)", right, "right")):
        evidence = shop.steps(shop.record("volume", "flow.py", edits, name))[-1]
        (stretch,) = find_stretches(evidence)
        measured, said = stretch.measured.tolist(), stretch.said.tolist()
        yield draw.draw_dots(measured, said, title, "log-determinant, measured", "as the layer says")


def course(shop: Workshop) -> Iterator[draw.Panel]:
    import numpy as np

    from gradproof.record.run import open_run

    run = open_run(shop.record("course", "late.py"))
    absmax = run.table("weight", "absmax")
    column = absmax.names.index("2.weight")
    known = np.isfinite(absmax.values[:, column])
    loss = ("", run.steps["step"].tolist(), run.steps["loss"].tolist())
    size = ("", absmax.steps[known].tolist(), absmax.values[known, column].tolist())
    yield draw.draw_lines([loss], "the loss", "step", "")
    yield draw.draw_lines([size], "absmax of 2.weight", "step", "", decades=True)


def swap(shop: Workshop) -> Iterator[draw.Panel]:
    from gradproof.instruments.swap import swap as exchange

    steps = {evidence.step: evidence for evidence in shop.steps(shop.record("course", "late.py"))}
    early = steps[max(step for step in steps if step < 500)]
    late = steps[min(step for step in steps if step >= 500)]
    found = exchange([early], [late])
    losses = [
        ("early", found.early_as_it_was),
        ("late batch", found.late_batch_early_weights),
        ("late weights", found.early_batch_late_weights),
        ("late", found.late_as_it_was),
    ]
    yield draw.draw_bars(losses, "data and weights exchanged", "", "loss")
    parts = [(each.part, each.share) for each in found.put_back]
    yield draw.draw_bars(parts, "parts of the weights put back", "", "share of the rise that is gone")


def changed(shop: Workshop) -> Iterator[draw.Panel]:
    from gradproof.instruments.changed import table_of

    steps = shop.steps(shop.record("changed", "clicks.py"))
    sides = [
        [table_of(e) for e in steps if e.step < 1100],
        [table_of(e) for e in steps if e.step >= 1100],
    ]
    brand_of: dict[float, float] = {}
    for title, side in zip(("before step 1100", "from step 1100 on"), sides, strict=True):
        told: dict[int, list[bool]] = {0: [], 1: [], 2: [], 3: []}
        for table in side:
            item, brand, region = (table[f"input[:, {column}]"] for column in range(3))
            for one, its, where in zip(item, brand, region, strict=True):
                told[int(where)].append(brand_of.setdefault(one, its) == its)
        bars = [(f"region {where}", sum(hits) / max(1, len(hits))) for where, hits in told.items()]
        yield draw.draw_bars(bars, title, "", "an item tells its brand")


def said(shop: Workshop) -> Iterator[draw.Panel]:
    from gradproof.record.run import open_run

    run = open_run(shop.record("said", "warned.py"))
    times = {each["line"].rpartition(":")[2]: each["times"] for each in run.info["facts"]["said"]}
    source = shown_on("said", "warned.py").rstrip().splitlines()
    lines = [(text, times.get(str(number), 0)) for number, text in enumerate(source, 1)]
    yield draw.draw_source(lines, "warned.py")


PICTURED: tuple[Callable[[Workshop], Iterator[draw.Panel]], ...] = (
    hearing, rows, weights, update, arms, digits, fed, order, registration, volume, course, swap, changed,
    said,
)  # fmt: skip


def main(wanted: list[str]) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        shop = Workshop(Path(directory))
        for picture in PICTURED:
            if not wanted or picture.__name__ in wanted:
                text = draw.render_picture(*picture(shop))
                (PICTURES / f"{picture.__name__}.svg").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
