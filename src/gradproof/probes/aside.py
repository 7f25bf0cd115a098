"""Whether somebody else records what runs now: then nothing of ours may run among it.

A CUDA graph would replay our kernels for ever, and must not be waited for while it is captured. A tracer would write
our operations into the user's graph.
"""

from __future__ import annotations

import torch

_uses_cuda = False  # once it does, it does to the end
_is_tracing = torch._C._is_tracing


def is_recorded() -> bool:
    """Asked at every hook: 0.1 µs where there is no GPU. On one, it is about the stream that this thread works on."""
    global _uses_cuda
    _uses_cuda = _uses_cuda or torch.cuda._initialized
    return _is_tracing() or (_uses_cuda and torch.cuda.is_current_stream_capturing())
