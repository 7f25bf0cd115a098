"""Shares of the copy rate of variants of the source; puts the best right one into place."""
import sys, time
sys.path.insert(0, "src"); sys.path.insert(0, "benchmarks")
import torch
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from measure import gpu_ms, forward_backward, copy_rate
from gradproof.kernels import cuda_loss, cuda_driver, triton_loss
from gradproof.kernels.cross_entropy import cross_entropy
from gradproof.kernels.loss_options import LossOptions
from gradproof.kernels.reference import reference_loss_and_gradient
T0 = time.monotonic()
def say(*a): print(f"[{time.monotonic() - T0:4.1f}]", *a, flush=True)
base, both = (Path(f"scratch/{n}.cu").read_text() for n in ("base", "both"))
VARIANTS = {"base": base, "both": both, "plain stores": base.replace("__stcs((uint4*)out, make_uint4(words[0], words[1], words[2], words[3]))", "if (ODD) __stcs((uint4*)out, make_uint4(words[0], words[1], words[2], words[3])); else *(uint4*)out = make_uint4(words[0], words[1], words[2], words[3])").replace("__stcs((float4*)(out + i), make_float4(dx[i], dx[i + 1], dx[i + 2], dx[i + 3]))", "if (ODD) __stcs((float4*)(out + i), make_float4(dx[i], dx[i + 1], dx[i + 2], dx[i + 3])); else *(float4*)(out + i) = make_float4(dx[i], dx[i + 1], dx[i + 2], dx[i + 3])"),
            "one fma": both.replace("if (ODD) __stcs(out, words);", "__stcs(out, words);").replace("    else *out = words;\n", "")}
PATCH = {}
real_read = Path.read_text
Path.read_text = lambda self, *a, **k: PATCH["source"] if self.name == "cross_entropy.cu" else real_read(self, *a, **k)
rate = copy_rate()["GB/s"]
say("copy rate", rate)
shares, wrong = {name: [] for name in VARIANTS}, {name: 0 for name in VARIANTS}
for dtype in (torch.bfloat16, torch.float32):
    for n, v in ((8192, 32000), (8192, 50257), (8192, 128256), (4096, 262144)):
        g = torch.Generator("cuda").manual_seed(v)
        x = torch.empty(n, v, dtype=dtype, device="cuda")
        for part in x.split(1024): part.copy_(torch.randn(part.shape, generator=g, device="cuda") * 3)
        y = torch.randint(0, v, (n,), generator=g, device="cuda"); y[::17] = -100
        x.requires_grad_()
        limit = 2 * x.numel() * x.element_size() / rate / 1e6
        rows = torch.linspace(1, n - 1, 24, device="cuda").long()
        exact, _, dexact = reference_loss_and_gradient(x.detach()[rows], y[rows], None, None, LossOptions(reduction="none"))
        one = torch.ones((), dtype=torch.float64, device="cuda")
        out = torch.empty_like(x.detach())
        for name, source in VARIANTS.items():
            PATCH["source"] = source; cuda_loss._compiled.cache_clear(); cuda_driver.find_kernel.cache_clear()
            try:
                plan = cuda_loss.find_plan(x.detach(), out, None, LossOptions())
                run = lambda: cuda_loss.losses_and_gradient(x.detach(), y, None, LossOptions(), one, out, plan)
                out.fill_(torch.nan)
                losses, _ = run()
                valid = y[rows] != -100
                gradient = ((out[rows].double() - dexact).abs().amax(1) / dexact.abs().amax(1).clamp_min(1e-300))[valid].max().item()
                loss = ((losses[rows] - exact).abs() / exact.clamp_min(1e-30))[valid].max().item()
                nan = out.isnan().any().item()
                ok = loss <= 1e-6 and gradient <= (2e-6 if dtype == torch.float32 else 2**-8) and not nan
                wrong[name] += not ok
                alone = limit / gpu_ms(run, 8, 2)
                whole = limit / gpu_ms(forward_backward(lambda: cross_entropy(x, y), x), 10, 3)
                shares[name].append(whole)
                say(f"{str(dtype)[6:]} {v} {name}: alone {alone:.3f} whole {whole:.3f} loss {loss:.1e} gradient {gradient:.1e}{' NaN' if nan else ''}")
            except Exception as e:
                wrong[name] += 1
                say("failed", name, v, str(e)[:300])
        del x, y, out, exact, dexact
        torch.cuda.empty_cache()
for name in VARIANTS: say(name, "wrong", wrong[name], "met", sum(s >= 0.85 for s in shares[name]), "mean", sum(shares[name]) / max(1, len(shares[name])))
right = [name for name in ("both", "base") if not wrong[name]] or ["base"]
best = max(right, key=lambda name: (sum(s >= 0.85 for s in shares[name]), sum(shares[name])))
Path("src/gradproof/kernels/cross_entropy.cu").write_text(VARIANTS[best])
say("chosen", best)
