"""A warning that the script has caused is shown at the place that it has without us."""

import subprocess
import sys
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradproof.errors import warn
from gradproof.probes.watch import watch

SCRIPT = """
import warnings
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def helper():
    warnings.warn("from a helper", stacklevel=2)

model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
scheduler.step()
for x, in DataLoader(TensorDataset(torch.randn(4, 2)), pin_memory=True):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
helper()
warnings.warn("from the top", stacklevel=2)
"""


def places_of_warnings(*command):
    shown = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300).stderr
    return [line for line in shown.splitlines() if "Warning: " in line]


def test_a_script_warns_at_the_same_lines_as_without_us(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    plain = places_of_warnings("train.py")
    watched = places_of_warnings("-m", "gradproof", "run", "--examine", "off", "train.py")
    paths = [line.partition(" ")[0].rsplit("/", 1)[-1] for line in plain]
    assert len(plain) >= 4 and any("from the top" in line for line in plain), plain
    assert any(path.startswith("dataloader.py") for path in paths) or torch.accelerator.is_available()
    assert watched == plain


def test_the_function_is_put_back_and_our_own_warnings_keep_their_place(tmp_path):
    before = warnings.warn
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, out=tmp_path / "run", experiments=False):
        assert warnings.warn is not before and warnings.warn.__name__ == "warn"
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            warn("ours", stacklevel=1)
            next(iter(DataLoader(TensorDataset(torch.randn(4, 2)), pin_memory=True)))
    assert warnings.warn is before
    assert seen[0].filename == __file__
    assert all("gradproof" not in warning.filename for warning in seen[1:])
