import sys
sys.path.insert(0, "src")
import torch
from gradproof.kernels import cuda_loss
from gradproof.kernels.loss_options import LossOptions
dtype = getattr(torch, sys.argv[1]); v = int(sys.argv[2]); n = 1024 if v > 100000 else 4096
x = torch.randn(n, v, device="cuda", dtype=dtype); y = torch.randint(0, v, (n,), device="cuda"); g = torch.empty_like(x)
scale = torch.tensor(1e-3, dtype=torch.float64, device="cuda")
plan = cuda_loss.plan_row(v, x.element_size(), True)
for _ in range(2):
    cuda_loss.losses_and_gradient(x, y, None, LossOptions(), scale, g, plan)
torch.cuda.synchronize()
