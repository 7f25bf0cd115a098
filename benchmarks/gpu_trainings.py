"""Every training of faults/accelerated.py, plain and under `gradproof run`: what was said, and what watching changed.

    python benchmarks/gpu_trainings.py --out DIR [--jobs 4] [--only REGEX] [--shard 1/3] [--steps N] [--limit 180]
    python benchmarks/gpu_trainings.py --out DIR --timing [--only REGEX] [--rounds 2]      pairs alone, for the clock

Ratios of loop times mean something with one job only: --timing. DIR/results.jsonl grows while it runs, so that what is
finished stays when a machine is taken away; DIR/results.json and DIR/table.md are written at the end. SMALL=1 in the
environment makes every training small enough for one core.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from gradproof.faults.accelerated import FAULTS, HEALTHY, Planted, Sound, plant  # noqa: E402

TIMED = r"^(gpt_compiled|resnet_amp|forecast_graph|tied_accum|moe_bf16)-as-it-is$"
COMPLAINT = re.compile(r"\w*Warning:|^Traceback|^\w*Error\b|Segmentation|CUDA error|core dumped")
NAMED_LINE = re.compile(r"\w+\.py:(\d+)")
MOST_LINES = 6  # a finding that names more lines than this names none


# one process -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """How one process ended; `end` is ok, exit N, signal N or limit."""

    end: str
    seconds: float
    result: dict[str, Any]  # what RESULT said
    complaints: list[str]
    tail: str
    diagnosis: dict[str, Any] | None = None
    diagnosed_s: float | None = None  # from the start of the process until the diagnosis was in its file


def run_process(command: list[str], folder: Path, limit: float, diagnosis: Path | None = None) -> Outcome:
    """Run to the end or to the limit, with all its children, whatever it does."""
    out, err = folder / "stdout", folder / "stderr"
    start, wall = time.time(), time.perf_counter()
    with out.open("wb") as to_out, err.open("wb") as to_err:
        process = subprocess.Popen(
            command, cwd=folder, stdout=to_out, stderr=to_err, stdin=subprocess.DEVNULL,
            env=environment(), process_group=0,
        )  # fmt: skip
        try:
            code = process.wait(limit)
            end = "ok" if code == 0 else f"exit {code}" if code > 0 else f"signal {-code}"
        except subprocess.TimeoutExpired:
            end = "limit"
        end_group(process)
    seconds = time.perf_counter() - wall
    said, complaint = out.read_text(errors="replace"), err.read_text(errors="replace")
    report, after = read_diagnosis(diagnosis, start)
    return Outcome(end, seconds, read_result(said), complaints(complaint), complaint[-1500:], report, after)


def environment() -> dict[str, str]:
    """The caller's, with src on the path, and one thread a process, since several run at a time."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def end_group(process: subprocess.Popen) -> None:
    """End what is left of a training: itself, and loaders' workers that outlived it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_result(said: str) -> dict[str, Any]:
    lines = [line for line in said.splitlines() if line.startswith("RESULT ")]
    try:
        return json.loads(lines[-1].removeprefix("RESULT ")) if lines else {}
    except json.JSONDecodeError:
        return {}


def complaints(text: str) -> list[str]:
    return list(dict.fromkeys(line.strip()[:200] for line in text.splitlines() if COMPLAINT.search(line)))


def read_diagnosis(file: Path | None, start: float) -> tuple[dict[str, Any] | None, float | None]:
    if file is None or not file.exists():
        return None, None
    try:
        return json.loads(file.read_text()), file.stat().st_mtime - start
    except json.JSONDecodeError:  # cut off in mid-file
        return None, None


# one training ----------------------------------------------------------------------------------------------


def run_plain(script: Path, steps: int, limit: float) -> Outcome:
    return run_process([sys.executable, script.name, *step_options(steps)], script.parent, limit)


def run_watched(script: Path, steps: int, limit: float) -> Outcome:
    report = script.parent / "diagnosis.json"
    report.unlink(missing_ok=True)
    gradproof = [sys.executable, "-m", "gradproof", "run", "--out", tempfile.mkdtemp(dir=script.parent)]
    command = [*gradproof, "--json", report.name, script.name, *step_options(steps)]
    return run_process(command, script.parent, limit, report)


def step_options(steps: int) -> list[str]:
    return ["--steps", str(steps)] if steps else []


def examine(case: Planted | Sound, args: argparse.Namespace) -> dict[str, Any]:
    """One training with and without gradproof, judged."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        script = Path(folder) / f"{case.script}.py"
        script.write_text(plant(case))
        wants_plain = args.plain == "all" or (args.plain == "healthy" and isinstance(case, Sound))
        plain = run_plain(script, args.steps, args.limit) if wants_plain else None
        watched = run_watched(script, args.steps, args.limit)
        row = {"name": case.name, "script": case.script, **judge(case, watched.diagnosis, script.read_text())}
        row |= describe_watched(watched)
        keep_questions(Path(folder), args.out / "asked" / f"{case.name}.jsonl")
        if plain is not None:
            row |= compare(plain, watched)
            if row["weights"] == "changed":  # a training that does not even agree with itself says nothing
                again = run_plain(script, args.steps, args.limit)
                if again.result.get("weights") != plain.result.get("weights"):
                    row["weights"] = "unsteady"
    return row


def keep_questions(folder: Path, to: Path) -> None:
    """What became of every question, what was said and recorded: for who looks into a miss."""
    to.parent.mkdir(exist_ok=True)
    with to.open("w") as kept:
        for name in ("diagnosis.json", "*/run.json"):
            for file in folder.glob(name):
                found = json.loads(file.read_text())
                keys = ("causes", "notes", "symptoms", "failure", "taping", "cost")
                kept.write(json.dumps({key: found[key] for key in keys if key in found}) + "\n")
        for file in folder.glob("*/examination.jsonl"):
            kept.writelines(line for line in file.open() if '"asked"' in line or '"confirmed"' in line)


def judge(case: Planted | Sound, diagnosis: dict[str, Any] | None, source: str) -> dict[str, Any]:
    """The diagnosis against what was planted; for a healthy training, what it was accused of."""
    causes = (diagnosis or {}).get("causes", [])
    counts = {level: sum(cause["level"] == level for cause in causes) for level in ("problem", "warning")}
    first = causes[0] if causes else {}
    row = {"said": [f"{cause['level']} {cause['id']}" for cause in causes], "said_where": first.get("where")}
    row |= {"problems": counts["problem"], "warnings": counts["warning"]}
    row |= {"level": first.get("level"), "confidence": first.get("confidence")}
    if isinstance(case, Sound):
        return {"family": "healthy", "diagnosed": diagnosis is not None, **row}
    right = {case.family, *case.also}
    families = list(dict.fromkeys(cause["family"] for cause in causes))
    hit = next((cause for cause in causes if cause["family"] in right), None)
    place = names_place(case.place, hit, source) if hit and case.place else None
    if hit:
        row |= {"level": hit["level"], "confidence": hit.get("confidence"), "said_where": hit.get("where")}
    verdict = {
        "top1": bool(right & set(families[:1])),
        "top3": bool(right & set(families[:3])),
        "place": place,
    }
    return {"family": case.family, "id": case.id, "diagnosed": diagnosis is not None, **row, **verdict}


def names_place(pattern: str, cause: dict[str, Any], source: str) -> bool:
    """Whether a finding names the place: in its words, or by the number of a line that fits."""
    where = str(cause.get("where") or "")
    text = " ".join([where, *cause.get("evidence", [])])
    numbers = {int(number) for number in NAMED_LINE.findall(text)}
    if len(numbers) > MOST_LINES:
        numbers = {int(number) for number in NAMED_LINE.findall(where)}
    lines = source.splitlines()
    named = [lines[number - 1] for number in numbers if 0 < number <= len(lines)]
    return any(re.search(pattern, piece) for piece in (text, *named))


def describe_watched(watched: Outcome) -> dict[str, Any]:
    row: dict[str, Any] = {"watched_end": watched.end, "watched_s": watched.seconds}
    row |= {
        "diagnosed_s": watched.diagnosed_s,
        "watched": watched.result,
        "new_complaints": watched.complaints,
    }
    if watched.end != "ok" or watched.diagnosis is None:
        row["stderr"] = watched.tail
    return row


def compare(plain: Outcome, watched: Outcome) -> dict[str, Any]:
    """What watching changed: the end, the weights, memory, time, and what is complained of."""
    hashes = plain.result.get("weights"), watched.result.get("weights")
    row: dict[str, Any] = {"plain_end": plain.end, "plain_s": plain.seconds, "plain": plain.result}
    row |= {"same_end": plain.end == watched.end, "killed": plain.end == "ok" and watched.end != "ok"}
    row["weights"] = "unknown" if None in hashes else "same" if hashes[0] == hashes[1] else "changed"
    row["memory_ratio"] = ratio(watched.result.get("peak_bytes"), plain.result.get("peak_bytes"))
    row["loop_ratio"] = ratio(watched.result.get("seconds"), plain.result.get("seconds"))
    row["new_complaints"] = [line for line in watched.complaints if line not in plain.complaints]
    return row


def ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None


# tables ----------------------------------------------------------------------------------------------------

HEAD = (
    *("training", "cause", "said first", "1st", "in 3", "place", "level, confidence", "diagnosis after s"),
    *("memory ×", "loop ×", "ends", "weights", "new on stderr"),
)


def render(rows: list[dict[str, Any]]) -> str:
    faults = [row for row in rows if row["family"] != "healthy"]
    healthy = [row for row in rows if row["family"] == "healthy"]
    parts = []
    if faults:
        parts += ["## Faults", table(HEAD, [fault_cells(row) for row in faults])]
    if healthy:
        head = ("training", "problems", "warnings", "said", *HEAD[7:])
        parts += ["## Healthy", table(head, [healthy_cells(row) for row in healthy])]
    parts += ["## Totals", "\n".join(f"- {line}" for line in totals(faults, healthy))]
    return "\n\n".join(parts) + "\n"


def table(head: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)


def fault_cells(row: dict[str, Any]) -> list[str]:
    said = row["said"][0] if row["said"] else "nothing" if row["diagnosed"] else "no diagnosis"
    level = f"{row['level']}, {shown(row['confidence'])}" if row["level"] else "–"
    verdict = [mark(row["top1"]), mark(row["top3"]), mark(row["place"])]
    return [row["name"], row["id"], said, *verdict, level, *changed_cells(row)]


def healthy_cells(row: dict[str, Any]) -> list[str]:
    said = "; ".join(row["said"]) or ("nothing" if row["diagnosed"] else "no diagnosis")
    return [row["name"], str(row["problems"]), str(row["warnings"]), said, *changed_cells(row)]


def changed_cells(row: dict[str, Any]) -> list[str]:
    ends = row["watched_end"] if row.get("same_end", True) else f"{row['plain_end']} → {row['watched_end']}"
    numbers = [shown(row.get(key)) for key in ("diagnosed_s", "memory_ratio", "loop_ratio")]
    complaint = "; ".join(row["new_complaints"])[:120]
    return [*numbers, ends, row.get("weights", "–"), complaint]


def mark(value: bool | None) -> str:
    return "–" if value is None else "yes" if value else "no"


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"
    return "–" if value is None else str(value)


def totals(faults: list[dict[str, Any]], healthy: list[dict[str, Any]]) -> list[str]:
    placed = [row["place"] for row in faults if row["place"] is not None]
    rows = [*faults, *healthy]
    both = [row for row in rows if "same_end" in row]
    named = lambda chosen: ", ".join(row["name"] for row in chosen) or "none"  # noqa: E731
    accused = [row for row in healthy if row["problems"]]
    killed = [row for row in both if row["killed"]]
    changed = [row for row in both if row["weights"] == "changed"]
    silent = [row for row in rows if not row["diagnosed"]]
    return [
        f"top-1: {sum(row['top1'] for row in faults)} of {len(faults)}",
        f"top-3: {sum(row['top3'] for row in faults)} of {len(faults)}",
        f"places: {sum(placed)} of {len(placed)} named faults that have one",
        f"healthy accused: {len(accused)} of {len(healthy)} ({named(accused)})",
        f"healthy warned of: {sum(bool(row['warnings']) for row in healthy)} of {len(healthy)}",
        f"killed, though well without: {len(killed)} of {len(both)} ({named(killed)})",
        f"changed weights: {len(changed)} of {len(both)} ({named(changed)})",
        f"no diagnosis at all: {len(silent)} of {len(rows)} ({named(silent)})",
    ]


# timing ----------------------------------------------------------------------------------------------------


def time_pairs(case: Planted | Sound, args: argparse.Namespace) -> dict[str, Any]:
    """A training alone on the machine, plain and watched in turn; medians over the rounds."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        script = Path(folder) / f"{case.script}.py"
        script.write_text(plant(case))
        kinds: dict[str, list[Outcome]] = {"plain": [], "watched": []}
        for number in range(args.rounds):
            runs = [("plain", run_plain), ("watched", run_watched)]
            for kind, run in runs if number % 2 == 0 else reversed(runs):
                kinds[kind].append(run(script, args.steps, args.limit))
    row: dict[str, Any] = {"name": case.name}
    for kind, outcomes in kinds.items():
        row[f"{kind}_end"] = [outcome.end for outcome in outcomes]
        row[f"{kind}_loop_s"] = median_of([outcome.result.get("seconds") for outcome in outcomes])
        row[f"{kind}_wall_s"] = median_of([outcome.seconds for outcome in outcomes])
        row[f"{kind}_peak_gb"] = median_of(
            [outcome.result.get("peak_bytes", 0) / 1e9 for outcome in outcomes]
        )
    row["loop_ratio"] = ratio(row["watched_loop_s"], row["plain_loop_s"])
    row["wall_ratio"] = ratio(row["watched_wall_s"], row["plain_wall_s"])
    row["memory_ratio"] = ratio(row["watched_peak_gb"], row["plain_peak_gb"])
    return row


def median_of(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def render_timing(rows: list[dict[str, Any]]) -> str:
    keys = (
        *("plain_loop_s", "watched_loop_s", "loop_ratio", "plain_wall_s", "watched_wall_s", "wall_ratio"),
        *("plain_peak_gb", "watched_peak_gb", "memory_ratio"),
    )
    return (
        table(("training", *keys), [[row["name"], *(shown(row[key]) for key in keys)] for row in rows]) + "\n"
    )


# all of them -----------------------------------------------------------------------------------------------


def choose(args: argparse.Namespace) -> list[Planted | Sound]:
    cases: list[Planted | Sound] = [*FAULTS, *HEALTHY]
    only = args.only or (TIMED if args.timing else "")
    chosen = [
        case
        for case in cases
        if re.search(only, case.name) or re.search(only, getattr(case, "id", "healthy"))
    ]
    part, parts = (int(number) for number in args.shard.split("/"))
    return chosen[part - 1 :: parts]


def safely(
    work: Callable[[Planted | Sound, argparse.Namespace], dict[str, Any]], case, args
) -> dict[str, Any]:
    """The row of a training; one that cannot even be run must not end the others."""
    try:
        return work(case, args)
    except Exception as error:
        row = {"name": case.name, "family": getattr(case, "family", "healthy"), "id": getattr(case, "id", "")}
        row |= {
            "said": [],
            "diagnosed": False,
            "problems": 0,
            "warnings": 0,
            "new_complaints": [repr(error)[:300]],
        }
        nothing = {"top1": False, "top3": False, "place": None, "level": None, "confidence": None}
        return row | nothing | {"watched_end": "not run"}


def finite(value: Any) -> Any:
    """The same without NaN and infinity, which JSON does not know."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [finite(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="names, ids or 'healthy'")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for one run")
    parser.add_argument("--steps", type=int, default=0, help="of every training, instead of its own number")
    parser.add_argument("--shard", default="1/1", help="2/3: the second third of the trainings")
    parser.add_argument(
        "--plain", choices=("all", "healthy", "none"), default="all", help="what to run plain, too"
    )
    parser.add_argument(
        "--until", type=float, default=math.inf, help="seconds after which no training is begun"
    )
    parser.add_argument("--timing", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    work = time_pairs if args.timing else examine
    name = "timing" if args.timing else "results"
    begun, rows, left_out = time.perf_counter(), [], []

    def attempt(case: Planted | Sound) -> dict[str, Any] | None:
        if time.perf_counter() - begun > args.until:
            return None
        return safely(work, case, args)

    cases = choose(args)
    with (
        ThreadPoolExecutor(1 if args.timing else args.jobs) as pool,
        (args.out / f"{name}.jsonl").open("w") as log,
    ):
        futures = {pool.submit(attempt, case): case for case in cases}
        for done in as_completed(futures):
            row = done.result()
            if row is None:
                left_out.append(futures[done].name)
                continue
            rows.append(row)
            log.write(json.dumps(finite(row)) + "\n")
            log.flush()
            print(f"{len(rows)}/{len(cases)} {one_line(row)}", flush=True)
    order = [case.name for case in cases]
    rows.sort(key=lambda row: order.index(row["name"]))
    text = render_timing(rows) if args.timing else render(rows)
    (args.out / f"{name}.json").write_text(json.dumps(finite(rows), indent=1) + "\n")
    (args.out / ("timing.md" if args.timing else "table.md")).write_text(text)
    print("\n" + text)
    if left_out:
        print(f"Not begun after {args.until:.0f} s: {', '.join(left_out)}")


def one_line(row: dict[str, Any]) -> str:
    if "family" not in row:
        return f"{row['name']} loop × {shown(row['loop_ratio'])} memory × {shown(row['memory_ratio'])}"
    verdict = (
        f"problems {row['problems']}" if row["family"] == "healthy" else f"named first: {mark(row['top1'])}"
    )
    said = row["said"][0] if row["said"] else "nothing"
    return f"{row['name']}: {verdict}; said {said}; {row['watched_end']}; weights {row.get('weights', '–')}"


if __name__ == "__main__":
    main()
