"""A cascade of transformer stages whose output is judged through a frozen recurrent decoder: its gradient explodes.

The original's largest gradient was that of `stages.1.output_proj.weight`, so stage 1 was searched, layer by layer, for
a bad LayerNorm, an attention that overflows, a division by nearly zero. `--fixed` mends what was wrong.
"""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--fixed", action="store_true")
parser.add_argument("--steps", type=int, default=120)
args = parser.parse_args()

BATCH, TIME, CODE, WIDTH, STAGES = 16, 80, 12, 32, 3


class Stage(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.input_proj = nn.Linear(size, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(TIME, WIDTH))
        self.block = nn.TransformerEncoderLayer(
            WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.post_norm = nn.LayerNorm(WIDTH)
        self.output_proj = nn.Linear(WIDTH, CODE)

    def forward(self, x):
        return self.output_proj(self.post_norm(self.block(self.input_proj(x) + self.places)))


class Cascade(nn.Module):
    """Each stage hears the input and what the stages before it made of it."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(Stage(CODE * (1 + (i > 0))) for i in range(STAGES))

    def forward(self, x):
        out = self.stages[0](x)
        for stage in self.stages[1:]:
            out = out + stage(torch.cat([x, out], -1))
        return out


class Decoder(nn.Module):
    """From codes to a signal; trained elsewhere, and frozen."""

    def __init__(self, strength):
        super().__init__()
        self.rnn = nn.RNN(CODE, 64, batch_first=True)
        self.out = nn.Linear(64, 1)
        with torch.no_grad():
            self.rnn.weight_hh_l0.copy_(strength * torch.linalg.qr(torch.randn(64, 64))[0])
            self.rnn.weight_ih_l0.mul_(0.3)
        self.requires_grad_(False)

    def forward(self, codes):
        return self.out(self.rnn(codes)[0])


torch.set_num_threads(1)
torch.manual_seed(0)
model = Cascade()
decoder = Decoder(0.9 if args.fixed else 3.0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(args.steps):
    codes = torch.randn(BATCH, TIME, CODE)
    noisy = codes + 0.3 * torch.randn_like(codes)
    loss = 1e2 * (decoder(model(noisy)) - decoder(codes)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    norms = {name: float(p.grad.norm()) for name, p in model.named_parameters()}
    largest = max(norms, key=norms.get)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 30 == 0 or step == args.steps - 1:
        print(f"step {step:4d}  loss {loss.item():.4f}  gradient norm {norm.item():.1e}, largest: {largest}")
