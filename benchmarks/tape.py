"""What the tape costs, and how it places a NaN next to the other tools.

    python benchmarks/tape.py            both tables, on the CPU and, where there is one, on the GPU
    python benchmarks/tape.py --times    the times only

Times are ratios to a plain training step (forward and backward), CPU time on the CPU, wall time on the GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import tape_nans
import tape_steps

from gradproof.tape.locate import find_first_bad_operation
from gradproof.tape.record import record
from gradproof.tape.replay import differentiate, replay_exactly, replay_forward
from gradproof.tape.shadow import shadow


def seconds(function, repeat=1, device="cpu"):
    clock = time.process_time if device == "cpu" else time.perf_counter
    if device != "cpu":
        torch.cuda.synchronize()
    start = clock()
    for _ in range(repeat):
        result = function()
    if device != "cpu":
        torch.cuda.synchronize()
    return (clock() - start) / repeat, result


def print_times(title, model, step, device="cpu"):
    names = {p: n for n, p in model.named_parameters()}

    def taped():
        with record(names) as tape:
            step()
        return tape

    step()
    plain, _ = seconds(step, 4, device)
    taped()
    recording, tape = seconds(taped, 1, device)
    rows = [("plain step", plain), ("recorded step", recording)]
    rows += [("replay, loss only", seconds(lambda: replay_forward(tape), 1, device)[0])]
    rows += [("replay, every operation", seconds(lambda: replay_exactly(tape), 1, device)[0])]
    rows += [("float64 derivative", seconds(lambda: differentiate(tape, torch.float64), 1, device)[0])]
    shadowing, answer = seconds(lambda: shadow(tape), 1, device)
    rows += [("shadow", shadowing), ("record + shadow", recording + shadowing)]
    rows += [("first bad operation", seconds(lambda: find_first_bad_operation(tape), 1, device)[0])]
    print(f"\n{title}: {len(tape.operations)} operations, tape {tape.bytes() / 1e6:.1f} MB")
    for name, value in rows:
        print(f"  {name:26s} {value:9.3f} s   {value / plain:6.2f} steps")
    print("  " + str(answer).replace("\n", "\n  "))


def small_gpt():
    torch.manual_seed(0)
    model = tape_steps.GPT(vocabulary=512, width=256, layers=4, heads=4, time=128)
    ids = torch.randint(0, 512, (8, 129))

    def step():
        model.zero_grad()
        model(ids[:, :-1], ids[:, 1:]).backward()

    return model, step


def gpt2(autocast):
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = tape_steps.GPT(vocabulary=50257, width=768, layers=12, heads=12, time=1024, dropout=0.0)
        ids = torch.randint(0, 50257, (4, 1025))
    for weight in (p for p in model.parameters() if p.dim() > 1):
        nn.init.normal_(weight, std=0.02)

    def step():
        model.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()

    return model, step


def gpu_memory(model, step):
    names = {p: n for n, p in model.named_parameters()}
    peaks = []
    for taped in (False, True):
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        with record(names) if taped else contextlib.nullcontext():
            step()
        peaks.append(torch.cuda.max_memory_allocated() / 1e9)
    print(
        f"  peak memory of a step {peaks[0]:.2f} GB, recorded {peaks[1]:.2f} GB ({peaks[1] / peaks[0]:.2f} ×)"
    )


# -- the same origins of NaN, by each tool: line, module, or not found


def place(lines, origin):
    """How finely a report that names these source lines places the origin."""
    file, marked = tape_nans.marked_line(origin)
    text, first = tape_nans.source_of(origin)
    if (file, marked) in lines:
        return "line"
    return "module" if any(f == file and first <= n < first + text for f, n in lines) else "-"


def with_gradproof(origin):
    model, batch = tape_nans.build(origin)
    with record({p: n for n, p in model.named_parameters()}) as tape:
        model(*batch).backward()
    bad = find_first_bad_operation(tape)
    return place([(bad.line.file, bad.line.number)] if bad and bad.line else [], origin)


def with_detect_anomaly(origin):
    """Any line of the script in the traceback that it prints, and the failing line of a custom backward."""
    model, batch = tape_nans.build(origin)
    lines = []
    with warnings.catch_warnings(record=True) as caught, contextlib.suppress(RuntimeError):
        warnings.simplefilter("always")
        with torch.autograd.set_detect_anomaly(True):
            loss = model(*batch)
            try:
                loss.backward()
            except RuntimeError as error:
                frames = traceback.extract_tb(error.__traceback__)
                lines += [(f.filename, f.lineno) for f in frames if "site-packages" not in f.filename][-1:]
                raise
    for warning in caught:
        found = [part for part in str(warning.message).splitlines() if part.strip().startswith("File ")]
        for part in (part for part in found if "site-packages" not in part):
            lines.append((part.split('"')[1], int(part.split("line ")[1].split(",")[0])))
    return place(lines, origin)


def with_hugging_face(origin):
    """The module of the last frame in the report of DebugUnderflowOverflow."""
    from transformers.debug_utils import DebugUnderflowOverflow

    model, batch = tape_nans.build(origin)
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(ValueError):
        DebugUnderflowOverflow(model)
        model(*batch).backward()
    headings = [line.split() for line in output.getvalue().splitlines() if line.startswith(" " * 18)]
    return "module" if headings and headings[-1][0] == "bad" else "-"


def with_torchlens(origin):
    """A loss that is bad by find_nan, else by bisect_nan_backward; any frame of what it names counts as its line."""
    import torchlens

    model, batch = tape_nans.build(origin)
    if not math.isfinite(float(model(*batch))):
        found = torchlens.debug.find_nan(model, list(batch), capture=torchlens_options())
        lines = [found.source_line.rsplit(":", 1)] if found.source_line else []
        return place([(file, int(number)) for file, number in lines], origin)
    try:
        trace, birth = torchlens_backward(model, batch)
    except AttributeError:  # 2.36.1 on an operator with several results: EqualEigenvalues
        birth = None
    if birth is None:
        return "-"
    context = trace[birth.op_label].code_context if birth.op_label else ()
    named = place([(frame.file, frame.line_number) for frame in context], origin)
    return named if named != "-" or birth.module != "bad" else "module"


def torchlens_options(**options):
    """Every layer by itself, and torch as it was afterwards."""
    import torchlens

    return torchlens.options.CaptureOptions(
        recurrence_detection=False, save_code_context=True, unwrap_when_done=True, **options
    )


def torchlens_backward(model, batch):
    import torchlens

    trace = torchlens.trace(
        model, list(batch), capture=torchlens_options(save_grads=True, backward_ready=True)
    )
    loss = next(op.out for op in trace if op.is_output)
    trace.log_backward(loss)
    return trace, torchlens.debug.bisect_nan_backward(trace).birth


def available():
    tools = [("gradproof", with_gradproof), ("detect_anomaly", with_detect_anomaly)]
    for name, function in (("transformers", with_hugging_face), ("torchlens", with_torchlens)):
        with contextlib.suppress(ImportError):
            __import__(name)
            tools.append((name, function))
    return tools


def print_comparison():
    tools = available()
    origins = [(c, "forward") for c in tape_nans.FORWARD] + [(c, "backward") for c in tape_nans.BACKWARD]
    print("\nplanted origin             born in  " + "".join(f"{name:>16s}" for name, _ in tools))
    silent = sum(with_healthy(origin) for origin in tape_nans.HEALTHY)
    found, costs = {}, {}
    for name, function in tools:  # one after another: a tool that stops in the middle may leave torch wrapped
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            costs[name] = cost(name)
            found[name] = [function(origin) for origin, _ in origins]
    for number, (origin, phase) in enumerate(origins):
        row = "".join(f"{found[name][number]:>16s}" for name, _ in tools)
        print(f"{origin.__name__:26s} {phase:9s}" + row)
    for level in ("line", "module", "-"):
        row = "".join(f"{found[name].count(level):>16d}" for name, _ in tools)
        print(f"{'placed by ' + level if level != '-' else 'not placed':36s}" + row)
    print(f"{'cost, × a plain step':36s}" + "".join(f"{costs[name]:>16.2f}" for name, _ in tools))
    print(f"gradproof is silent on {silent} of {len(tape_nans.HEALTHY)} healthy models full of −inf and NaN")


def with_healthy(healthy):
    model, batch = tape_nans.build(healthy)
    with record({p: n for n, p in model.named_parameters()}) as tape:
        model(*batch).backward()
    return find_first_bad_operation(tape) is None


def cost(tool):
    """A step of the small GPT under a tool, over a plain one; for gradproof the step it tapes and locates."""
    model, step = small_gpt()
    step()
    plain, _ = seconds(step, 3)
    if tool == "gradproof":

        def watched():
            with record({p: n for n, p in model.named_parameters()}) as tape:
                step()
            find_first_bad_operation(tape)

        return seconds(watched)[0] / plain
    if tool == "detect_anomaly":
        with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
            return seconds(step, 3)[0] / plain
    if tool == "transformers":
        from transformers.debug_utils import DebugUnderflowOverflow

        with contextlib.redirect_stdout(io.StringIO()):
            DebugUnderflowOverflow(model)
            return seconds(step, 3)[0] / plain
    ids = torch.randint(0, 512, (8, 129))
    return seconds(lambda: torchlens_backward(model, (ids[:, :-1], ids[:, 1:])))[0] / plain


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", action="store_true", help="no comparison with other tools")
    options = parser.parse_args()
    print_times("4-layer GPT, width 256, 8 × 128 tokens, float32, CPU", *small_gpt())
    if torch.cuda.is_available():
        F.linear(torch.ones(8, 8, device="cuda"), torch.ones(8, 8, device="cuda"))
        for autocast in (False, True):
            name = "bfloat16 autocast" if autocast else "float32"
            model, step = gpt2(autocast)
            print_times(
                f"GPT-2 124M, 4 × 1024 tokens, {name}, {torch.cuda.get_device_name()}", model, step, "cuda"
            )
            gpu_memory(model, step)
            del model, step
            torch.cuda.empty_cache()
    if not options.times:
        print_comparison()


if __name__ == "__main__":
    main()
