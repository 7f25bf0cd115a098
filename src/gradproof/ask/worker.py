"""Answers questions about runs, one a line, in a process of its own: what is replayed may crash, hang or fill memory.

`python -m gradproof.ask.worker` reads `{"path", "version", "what", …}` and writes `{"answer"}` or `{"refused"}`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from importlib import import_module
from typing import Any

from gradproof.ask.answer import cleaned
from gradproof.ask.opened import OpenedRun
from gradproof.errors import UserError


class Answers:
    """Keeps the run that was asked last, as long as it has not grown."""

    def __init__(self) -> None:
        self._opened: tuple[tuple[str, str], OpenedRun] | None = None

    def answer(self, path: str, version: str, what: str, arguments: dict[str, Any]) -> Any:
        if what == "brief":
            from gradproof.ask.brief import write_brief
            from gradproof.record.run import open_run

            return write_brief(open_run(path))
        if self._opened is None or self._opened[0] != (path, version):
            self._opened = (path, version), OpenedRun(path)
        return self._opened[1].ask(**arguments).as_data()


def reply(answers: Answers, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"answer": answers.answer(**request)}
    except UserError as error:
        return {"refused": cleaned(str(error), 1000)}
    except Exception as error:
        said = (str(error).splitlines() or [""])[0]
        return {"refused": cleaned(f"it could not be answered: {type(error).__name__}: {said}", 400)}


def serve() -> None:
    from gradproof.examination.worker import end_with

    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    # most questions need torch, whose import takes longer than their answers: it begins before the first comes
    threading.Thread(target=import_module, args=("gradproof.ask.fed",), daemon=True).start()
    lines = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whatever else is printed goes nowhere
    answers = Answers()
    for line in sys.stdin:
        lines.write(json.dumps(reply(answers, json.loads(line)), ensure_ascii=False) + "\n")
        lines.flush()


if __name__ == "__main__":
    serve()
