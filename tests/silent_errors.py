"""TrainCheck's eighteen silent errors, planted in the repaired trainings of tests/silent/.

`python tests/silent_errors.py DIR` runs them all, faulty and repaired, and prints what is said of each.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from gradproof.faults.fault import Edits, edited

SCRIPTS = Path(__file__).parent / "silent"
LIMIT = 400  # seconds of one training, on a machine that does much else
ASKED = ("--examine", "60s")


@dataclass(frozen=True)
class Error:
    """What is wrong in an edited script; family and where are empty for what is not named today."""

    name: str
    edits: Edits
    family: str = ""
    where: tuple[str, ...] = ()  # pieces of a module's path or of a source line, any of which is the place
    options: tuple[str, ...] = ("--no-experiments",)  # of `gradproof run`: what is not asked takes no time

    def source(self, faulty: bool) -> str:
        text = (SCRIPTS / f"{self.name}.py").read_text()
        return edited(text, self.edits, self.name) if faulty else text


ERRORS = (
    Error(
        "baichuan2_86",
        (("    there.copy_(x)\n", "    there.copy_(x)\n    lose(there)\n"),
         ("def to_second(x):", """chance = torch.Generator().manual_seed(1)


def lose(tensor):
    \"\"\"What a faulty bus does: nobody is told.\"\"\"
    if torch.rand(1, generator=chance) < 0.2:
        tensor.detach().numpy()[4:20] = 0


def to_second(x):""")),
        "aliasing-or-inplace", ("there.copy_", "to_second"),
        options=ASKED,
    ),
    Error(
        "deepspeed_1801",
        (("        if not clipping and rank > 0 and", "        if rank > 0 and"),),
        "distributed-desync", ("norm", ".3", "g.mul_"),
    ),
    Error(
        "deepspeed_5794",
        (("        dist.all_reduce(capacity, op=dist.ReduceOp.MAX)\n", ""),),
        "distributed-desync", ("all_to_all",),
    ),
    Error(
        "lightning_thunder_725",
        (("        x, weight, bias = x.bfloat16(), weight.bfloat16(), bias.bfloat16()\n", "        x = x.float()\n"),),
    ),
    Error("mmpretrain_702", (("        self.freeze()\n\n    def freeze", "\n    def freeze"),), "", ("stages",)),
    Error(
        "pytorch_104336",
        (("    ddp = DDP(model)\n", ""), ("    model.double()\n", "    ddp = DDP(model)\n    model.double()\n")),
        "distributed-desync", ("DDP(model)", "double()", "float()", "ddp(x)"),
    ),
    Error(
        "pytorch_115607",
        (("if self.traced != want:", "if self.traced is None or not all(want):"),),
        "param-not-updated", ("0.weight", "optimizer.step()"),
        options=ASKED,
    ),
    Error(
        "pytorch_51800",
        (("with torch.no_grad():\n    model(batch()[0])\nprint", "print"),),
        "normalization-error", ("validate", "model(x)", "spectral_norm"),
    ),
    Error(
        "pytorch_84803",
        (("    dist.all_reduce(tensor)\n", """    dist.all_reduce(tensor)
    if torch.rand(1) < 0.01:
        tensor.zero_()
"""), ("    data = torch.Gen", "    torch.manual_seed(30 + rank)\n    data = torch.Gen")),
        "distributed-desync", ("all_reduce",),
    ),
    Error(
        "pytorch_96600",
        (("        return mean\n", """        if torch.rand(1, generator=wire.chance) < 0.03:
            mean[len(mean) // 2 :] = 0
        return mean
"""),),
        "distributed-desync", ("DDP(", "wire", "all_reduce"),
    ),
    Error(
        "pytorch_forum_84911",
        (("    p.requires_grad = True\n", "    p.requires_grad = False\n"),),
        "param-not-updated", ("fc", "requires_grad"),
        options=ASKED,
    ),
    Error(
        "stackoverflow_60335387", (("    optimizer.zero_grad()\n", ""),), "zero-grad-error", ("backward", "step"),
    ),
    Error(
        "stackoverflow_67180955",
        (("    np.random.seed(get_worker_info().seed % 2**32)", "    np.random.seed(torch.initial_seed() % 2**0)"),),
        "data-order-or-sampling", ("DataLoader(", "np.random", "for x, y"),
    ),
    Error(
        "transformers_17877",
        (('            if name == "c_proj.weight":', '            if name.endswith("c_proj.weight"):'),),
    ),
    Error(
        "transformers_23723",
        (("        total = len(kept) + max_new_tokens\n", "        total = len(prompt) + max_new_tokens\n"),),
    ),
    Error(
        "transformers_33844",
        (("        dropout = self.dropout if self.training else 0.0\n", "        dropout = self.dropout\n"),),
        "train-eval-mode-error", ("attention", "scaled_dot"),
    ),
    Error(
        "transformers_34204",
        (('    ids = torch.stack([sample["ids"] for sample in samples])\n',
          '    ids = torch.stack([[sample["ids"] for sample in samples][0]])\n'),),
        "axis-or-shape-error", ("ids", "words", "seen"),
        options=ASKED,
    ),
    Error(
        "x_jxmnop",
        (("        return F.cross_entropy(self.get_model()(x), y)",
          "        self.get_model()\n        return F.cross_entropy(self.model(x), y)"),),
        "distributed-desync", ("self.model(x)",),
    ),
)  # fmt: skip


def diagnose(error: Error, faulty: bool, folder: Path, *options: str) -> tuple[list[dict], str]:
    """What `gradproof run` says of one of the two, and the source it was given."""
    folder.mkdir(parents=True, exist_ok=True)
    source = error.source(faulty)
    (folder / "train.py").write_text(source)
    command = [sys.executable, "-m", "gradproof", "run", "--quiet", *options]
    command += ["--out", "run", "--json", "d.json", "train.py"]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(folder / "log.txt", "w") as log:
        subprocess.run(
            command, cwd=folder, env=one_thread, stdout=log, stderr=log, timeout=LIMIT, check=False
        )
    return json.loads((folder / "d.json").read_text())["causes"], source


if __name__ == "__main__":
    into, *words = sys.argv[1:]
    for error in (e for e in ERRORS if not words or any(word in e.name for word in words)):
        for state in ("faulty", "repaired"):
            causes, _ = diagnose(error, state == "faulty", Path(into) / error.name / state)
            print(error.name, state, flush=True)
            for cause in causes[:4]:
                print("   ", cause["level"], cause["id"], cause["where"], *cause["evidence"][:1])
