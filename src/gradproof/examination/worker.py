"""Answers questions about specimens, one at a time: the only place where a recorded operation is ever run again.

`python -m gradproof.examination.worker` reads one request a line and writes one answer a line. It may be killed, crash
or hang at any time: who asked notes that, starts another one, and asks on.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

KEPT = 2  # specimens whose workings are kept at a time
TIMES_ITS_SIZE = 3  # what replaying takes at least
PUSHED_OUT = "newer steps have pushed this one out of the room that recorded steps have"
MOST_CHANGES = 5  # of the batches, that a run keeps
KEPT_CACHE = 1 << 30  # bytes that PyTorch may keep for the next question


class Worker:
    """Keeps the evidence of the last specimens, and what each question has kept of the specimens before."""

    def __init__(self) -> None:
        self._evidence: dict[str, Any] = {}
        self._share = 1.0
        self._memory: dict[str, tuple[list[str], dict[str, Any]]] = {}  # question -> (specimens seen, memory)

    def ask(
        self,
        question: str,
        specimens: list[str],
        device: str | None = None,
        threads: int = 0,
        share: float = 1.0,
    ) -> dict[str, Any]:
        """What a question says of the last of some specimens, having seen those before it in order.

        Of the memory that a GPU has free it takes a share; where that is too little, the answer is "later".
        """
        began = time.perf_counter()
        self._share = share
        try:
            if reason := self._why_not(question, self._evidence_of(specimens[-1], device)):
                return {"not_asked": reason, "seconds": round(time.perf_counter() - began, 4)}
            seen, memory = self._memory.get(question, ([], {}))
            if seen != specimens[: len(seen)] or len(seen) >= len(specimens):
                seen, memory = [], {}
            verdicts: list[Any] = []
            noted: dict[str, Any] = {}
            for path in specimens[len(seen) :]:
                if path != specimens[-1] and not os.path.exists(path):
                    continue
                evidence = self._evidence_of(path, device)
                if self._why_not(question, evidence):
                    continue
                set_threads(evidence.specimen, threads)
                evidence.memory, evidence.noted = memory, {}
                verdicts = self._verdicts(question, evidence)
                noted.update(evidence.noted)
            self._memory[question] = (list(specimens), memory)
            answer: dict[str, Any] = {"verdicts": [asdict(verdict) for verdict in verdicts], "noted": noted}
        except NoRoom as error:
            answer = {"later": str(error)}
        except Exception as error:
            # the training goes on between a question's turn and its answer
            if not os.path.exists(specimens[-1]):
                return {"not_asked": PUSHED_OUT, "seconds": round(time.perf_counter() - began, 4)}
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{os.path.basename(place.filename)}:{place.lineno}"
            said = (str(error).splitlines() or [""])[0][:300]
            answer = {"error": f"{type(error).__name__}: {said}", "place": where}
            self._memory.pop(question, None)
            if type(error).__name__ in ("OutOfMemoryError", "MemoryError"):
                self._evidence.clear()
        give_back()
        answer["seconds"] = round(time.perf_counter() - began, 4)
        return answer

    def _why_not(self, question: str, evidence: Any) -> str:
        from gradproof.experiments.needs import why_not
        from gradproof.experiments.table import BY_NAME

        return why_not(BY_NAME[question], evidence)

    def _verdicts(self, question: str, evidence: Any) -> list[Any]:
        from gradproof.experiments.table import BY_NAME, find

        return list(find(BY_NAME[question])(evidence))

    def extras(self, path: str, device: str | None = None) -> dict[str, Any]:
        """For the page: the gain of each module and, where somebody asked for it, each gradient against float64."""
        from gradproof.instruments.gains import gains_by_module

        evidence = self._evidence_of(path, device)
        found: dict[str, Any] = {}
        with suppress(Exception):
            found["gains"] = gains_by_module(evidence.tape)
        if "shadow" in vars(evidence):
            found["shadow"] = describe_shadow(evidence.shadow)
        return found

    def room(self) -> dict[str, Any]:
        """How many bytes a GPU has free."""
        import torch

        return {"free": torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0}

    def rest(self) -> dict[str, Any]:
        """Hold nothing on a GPU until the next question."""
        import torch

        self._evidence.clear()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return {}

    def again(self, name: str, pairs: list[dict[str, list[str]]]) -> dict[str, Any]:
        """Of two ranks that part in a parameter: memory or code, by the first pair of steps that decides it."""
        from gradproof.experiments.ranks.again import UNDECIDED, Two, who_wrote
        from gradproof.tape.specimen import load

        found: dict[str, Any] = {}
        for pair in pairs:
            one, other = (
                Two(int(rank), load(paths[0]) if len(paths) > 1 else None, load(paths[-1]))
                for rank, paths in pair.items()
            )
            set_threads(one.then, 0)
            said = who_wrote(one, other, name)
            if not found or said["outcome"] != UNDECIDED:
                found = {**said, "done": (one.first or one.then).step}
            if said["outcome"] != UNDECIDED:
                break
        return found

    def swap(self, early: list[str], late: list[str]) -> dict[str, Any]:
        """Whether the loss of late steps is their data's or their weights', by those of early steps."""
        from gradproof.instruments.changed import find_changes, table_of
        from gradproof.instruments.evidence import Evidence
        from gradproof.instruments.swap import describe_swap, swap
        from gradproof.instruments.worse import who_loses
        from gradproof.tape.specimen import load

        sides = [[Evidence(load(path, "cpu")) for path in side] for side in (early, late)]
        set_threads(sides[0][0].specimen, 0)
        found = describe_swap(swap(*sides))
        changes = find_changes(*([table_of(evidence) for evidence in side] for side in sides))
        said = [f"{change.column}: {change.text}" for change in changes]
        with suppress(Exception):  # more than was asked: the exchange itself stands without it
            said[:0] = map(str, filter(None, [who_loses(*sides)]))
        return found | {"changed": said[:MOST_CHANGES]}

    def _evidence_of(self, path: str, device: str | None) -> Any:
        room = share_of_gpu(Path(path), device, self._share)
        if path not in self._evidence:
            from gradproof.instruments.evidence import Evidence
            from gradproof.tape.specimen import load

            while len(self._evidence) >= KEPT:
                self._evidence.pop(next(iter(self._evidence)))
            run = Path(path).parent.parent
            if room is not None:
                raise NoRoom(room)
            self._evidence[path] = Evidence(load(path, device), directory=run)
        return self._evidence[path]


class NoRoom(Exception):
    """A GPU that somebody else uses has too little memory left."""


def share_of_gpu(specimen: Path, device: str | None, share: float) -> str | None:
    """On a GPU, take a share of what is free now and never more: the next training wants to start there, too.

    Where that is too little for a specimen, why.
    """
    import torch

    from gradproof.tape.label import read_label

    label = read_label(specimen)
    if device == "cpu" or label.get("device") != "cuda" or not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    mine = share * (free + torch.cuda.memory_reserved())
    if TIMES_ITS_SIZE * label["bytes"] > mine:
        return f"the GPU has {free / 1e9:.0f} GB free, and replaying {label['bytes'] / 1e9:.1f} GB takes more"
    torch.cuda.set_per_process_memory_fraction(min(1.0, mine / total))
    return None


def give_back() -> None:
    """What a question has left in PyTorch's cache is somebody else's memory."""
    import torch

    if (
        torch.cuda.is_initialized()
        and torch.cuda.memory_reserved() > 2 * torch.cuda.memory_allocated() + KEPT_CACHE
    ):
        torch.cuda.empty_cache()


def set_threads(specimen: Any, threads: int) -> None:
    """As many as the step had, for sums in the same order; those of a GPU's host are free to choose."""
    import torch

    recorded = specimen.environment.get("threads", 0) if specimen.label()["device"] == "cpu" else 0
    wanted = recorded or threads
    if wanted and wanted != torch.get_num_threads():
        torch.set_num_threads(wanted)


class Here:
    """A worker in this very process, for whoever trusts what it replays."""

    def __init__(self) -> None:
        self._worker = Worker()

    def ask(self, limit: float, **request: Any) -> dict[str, Any]:
        return json.loads(answer_to(self._worker, request))

    def warm_up(self) -> None:
        """It is here already."""

    def close(self) -> None:
        self._worker = Worker()


def answer_to(worker: Worker, request: dict[str, Any]) -> str:
    """The answer as it travels: one line of JSON."""
    from gradproof.record.schema import json_line

    calls: dict[str, Callable[..., dict[str, Any]]] = {
        "extras": worker.extras, "again": worker.again, "swap": worker.swap,
        "room": worker.room, "rest": worker.rest,
    }  # fmt: skip
    call = calls.get(request.pop("what"), worker.ask)
    try:
        return json_line(call(**request))
    except Exception as error:
        return json_line({"error": f"{type(error).__name__}: {error}"[:300]})


def describe_shadow(found: Any) -> dict[str, Any]:
    """The gradients of a step against float64, parameter by parameter, as the run keeps them."""
    return {
        "loss": found.loss,
        "true_loss": found.true_loss,
        "parameters": [
            {
                "name": p.name,
                "verdict": p.verdict,
                "error": p.error,
                "tolerance": p.tolerance,
                "cosine": p.cosine,
                "pattern": p.pattern,
            }
            for p in found.parameters
        ],
        "notes": list(found.notes),
    }


def stand_back() -> int:
    """Idle cores only, and the first to go when memory runs out: the training comes first. The priority until now."""
    until_now = os.getpriority(os.PRIO_PROCESS, 0)
    with suppress(OSError):
        os.nice(19)
    if os.getsid(0) == os.getpid():  # sessions share cores evenly, whatever is nice inside of one
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text("19")
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    return until_now


def come_forward(pid: int, priority: int) -> None:
    """For a process that stood back: the share of any other again, as far as the system lets it."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, priority)  # root alone may
        if os.getpgid(pid) == pid:
            os.setpriority(os.PRIO_PGRP, pid, priority)  # its threads, too
    with suppress(OSError):
        if os.getsid(pid) == pid:
            Path(f"/proc/{pid}/autogroup").write_text("0")


def end_with(parent: int) -> None:
    """Nobody is left to hear an answer: whatever is being worked out ends, too."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


def serve() -> None:
    """Requests from standard input, answers to what was standard output; whatever else is printed goes nowhere."""
    stand_back()
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    import gradproof.instruments.evidence  # noqa: F401  torch, and most of what will be asked for

    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    worker = Worker()
    for line in sys.stdin:
        answers.write(answer_to(worker, json.loads(line)) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
