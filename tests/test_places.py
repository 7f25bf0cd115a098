"""Findings name the line: call sites as the script makes them, and data traced back through the source."""

import textwrap
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

import gradproof
from gradproof.diagnosis.findings import Finding
from gradproof.diagnosis.places import CALLS, add_place
from gradproof.instruments.source import lines_behind, lines_of_names
from gradproof.probes.lines import Lines, find_condition, lines_that_set_lr
from gradproof.record.run import open_run
from gradproof.tape.operations import Line


def write(tmp_path, text):
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(text).lstrip())
    return str(file), file.read_text().splitlines()


def chain(tmp_path, text, mark, target=False):
    """The source lines behind the one that holds `mark`, nearest first."""
    file, lines = write(tmp_path, text)
    number = next(i for i, line in enumerate(lines, 1) if mark in line)
    return [lines[n - 1].strip() for n in lines_behind(Line(file, number, "<module>"), target)]


def test_a_table_is_followed_to_where_it_was_never_scaled(tmp_path):
    text = """
        table = load()
        features, price = table[:, :5], table[:, 5]
        x = features
        y = (price - price.mean()) / price.std()
        x_train, y_train = x[:100], y[:100]
        for rows in order.split(20):
            loss = mse(model(x_train[rows]), y_train[rows])
    """
    split, pair = "x_train, y_train = x[:100], y[:100]", "features, price = table[:, :5], table[:, 5]"
    assert chain(tmp_path, text, "model(") == [split, "x = features", pair]
    scaled = "y = (price - price.mean()) / price.std()"
    assert chain(tmp_path, text, "model(", target=True) == [split, scaled, pair]


def test_a_loader_is_followed_into_its_dataset(tmp_path):
    text = """
        class Shapes(Dataset):
            def __init__(self, count):
                self.labels = torch.randint(0, 3, (count,))
                self.images = draw(self.labels)
                self.images = self.images[torch.randperm(count)]

            def __getitem__(self, index):
                image = self.images[index].float()
                return image.unsqueeze(0), self.labels[index]

        def train(loader):
            for x, y in loader:
                step(x, y)

        train(DataLoader(Shapes(100), shuffle=True))
    """
    found = chain(tmp_path, text, "for x, y")
    assert found[0].startswith("return image") and "self.images = self.images[torch.randperm(count)]" in found
    targets = chain(tmp_path, text, "for x, y", target=True)
    assert targets[-1] == "self.labels = torch.randint(0, 3, (count,))" and len(targets) == 2


def test_a_helper_is_followed_through_its_callers(tmp_path):
    text = """
        def make():
            return 255 * draw()

        def windows(series, starts):
            return torch.stack([series[s : s + 8] for s in starts])

        def main():
            raw = make()
            series = raw
            model(windows(series, [1, 2]))
    """
    assert chain(tmp_path, text, "torch.stack") == ["series = raw", "return 255 * draw()"]


@pytest.mark.parametrize(
    "text", ["x = x + 1\nloss = model(x)", "def f(x):\n    return model(x)\nf(f)", "model(["]
)
def test_source_that_leads_nowhere_is_survived(tmp_path, text):
    file, lines = write(tmp_path, text)
    for number in range(1, len(lines) + 1):
        assert isinstance(lines_behind(Line(file, number, "f")), list)
        assert isinstance(lines_of_names(Line(file, number, "f")), list)
    assert lines_behind(Line("/nowhere.py", 3, "f")) == []


def test_what_decides_on_a_step_and_where_lr_is_set(tmp_path):
    file, lines = write(
        tmp_path,
        """
        if __name__ == "__main__":
            for i, batch in enumerate(batches):
                if (i + 1) // 4 == 1:
                    optimizer.step()
                lr = 0.1 * i
                for group in optimizer.param_groups:
                    group["lr"] = lr
                    group['lr'] *= 0.5
        optimizer.step()
        """,
    )
    assert [find_condition(file, number) for number in (4, 9)] == [3, None]
    found = list(lines_that_set_lr("train.py", lines))
    assert found == ["train.py:7, computed at train.py:5", "train.py:8"]


def test_each_call_site_is_noted_once():
    lines = Lines()
    for _ in range(100):
        lines.note("backward")
    lines.note("backward")
    assert len(lines.sites["backward"]) == 1  # and after the first calls nobody looks any more


def train(out, spoil=lambda model: None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    nn.init.normal_(model[0].weight)
    spoil(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gradproof.watch(model, optimizer, out=out, experiments=False):
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for _ in range(12):
            loss = model(torch.randn(16, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return open_run(out)


def test_a_run_knows_where_its_script_does_what(tmp_path):
    source = Path(__file__).read_text().splitlines()
    lines = train(tmp_path / "run").info["facts"]["lines"]
    expected = {
        "forward": "loss = model(",
        "zero_grad": "optimizer.zero_grad()",
        "backward": "loss.backward()",
        "step": "optimizer.step()",
        "scheduler": "schedule.step()",
        "scheduler made": "schedule = ",
    }
    for what, text in expected.items():
        (site,) = lines[what]
        assert site.startswith("test_places.py:")
        assert source[int(site.rpartition(":")[2]) - 1].strip().startswith(text), what


def test_a_finding_without_a_line_gets_one(tmp_path):
    run = train(tmp_path / "run")
    bare = Finding("zero-grad-error", "zero-grad-error/stale", "problem", "proven", (), "", where="0.weight")
    (site,) = run.info["facts"]["lines"]["zero_grad"]
    assert add_place(bare, run).where == f"0.weight ({site})"
    placed = Finding("zero-grad-error", "x", "problem", "proven", (), "", where="0.weight (a.py:3)")
    assert add_place(placed, run) is placed
    run.info["facts"]["lines"] = {}
    assert add_place(bare, run) is bare


def test_every_family_with_calls_exists():
    from gradproof.diagnosis.causes import BY_FAMILY

    assert set(CALLS) <= set(BY_FAMILY)


@pytest.mark.parametrize("group", ["gradients", "steps", "data", "network"])
def test_a_cause_and_its_planted_faults_are_in_files_of_one_name(group):
    causes = import_module(f"gradproof.diagnosis.catalogue.{group}").CAUSES
    faults = import_module(f"gradproof.faults.{group}").FAULTS
    assert {cause.family for cause in causes} == {fault.family for fault in faults}


def test_what_the_catalogue_names_exists():
    """Symptoms and interventions of each family."""
    from gradproof.diagnosis import causes
    from gradproof.diagnosis.causes import CAUSES
    from gradproof.probes.interventions import INTERVENTIONS

    catalogue = Path(causes.__file__)
    source = "".join(file.read_text() for file in catalogue.parent.glob("*.py") if file != catalogue)
    fixes = {function.__name__ for function in INTERVENTIONS}
    for cause in CAUSES:
        assert cause.raised_by and cause.fix and cause.decided_by and cause.title, cause.family
        missing = [
            name for name in cause.raised_by if f'"{name}"' not in source and f'/{name}"' not in source
        ]
        assert not missing, (cause.family, missing)
        assert not cause.intervention or cause.intervention in fixes, cause.family
