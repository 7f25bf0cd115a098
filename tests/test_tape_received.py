"""Memory that a collective fills and that is read piece by piece: every piece is on the tape."""

import torch
import torch.distributed as dist
from torch import nn

from gradproof.tape.locate import find_never_written
from gradproof.tape.record import record
from gradproof.tape.replay import replay_forward


def test_a_buffer_that_is_read_in_two_pieces_is_known_whole(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        model, x = nn.Linear(4, 4), torch.randn(6, 4)
        with record({p: n for n, p in model.named_parameters()}) as tape:
            got = torch.empty_like(x)
            dist.all_to_all_single(got, x)
            loss = (model(got[:2]).sum() + model(got[2:]).square().sum()).square()
            loss.backward()
    finally:
        dist.destroy_process_group()
    assert find_never_written(tape) is None
    assert torch.allclose(replay_forward(tape).losses[0], loss.detach())
