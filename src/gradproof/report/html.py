"""A run, or several, as one HTML file that needs nothing else: no network, no server, no library.

The parts in page/ are put together as they are; a run's own words travel as compressed data and reach the page as
text only. The policy in the head lets exactly this script run, and lets nothing be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradproof.diagnosis.findings import Diagnosis
from gradproof.diagnosis.ranking import diagnose
from gradproof.errors import plain
from gradproof.record.run import Run
from gradproof.record.schema import json_line
from gradproof.report.comparison import compare_trainings
from gradproof.report.payload import pack_run
from gradproof.report.text import render_text

PARTS = Path(__file__).parent / "page"
# in this order: each uses what those before it define
SCRIPTS = (
    "dom.js",
    "data.js",
    "view.js",
    "plot.js",
    "heatmap.js",
    "tensors.js",
    "tensor.js",
    "tree.js",
    "diagnosis.js",
    "curves.js",
    "tape.js",
    "ranks.js",
    "environment.js",
    "compare.js",
    "live.js",
    "page.js",
)


def render_page(runs: Sequence[Run], diagnoses: Sequence[Diagnosis] = ()) -> str:
    """One file for one run; for several, their comparison, and each of them."""
    found = list(diagnoses) or [diagnose(run) for run in runs]
    text = "\n".join(render_text(diagnosis) for diagnosis in found)
    return assemble(pack_runs(runs, found), title=f"{plain(runs[0].path.name)} · gradproof", text=text)


def pack_runs(runs: Sequence[Run], found: Sequence[Diagnosis]) -> dict[str, Any]:
    """What the page reads: every run in its share of the room, and what tells several apart."""
    share = 1 / len(runs)
    packed = [pack_run(run, diagnosis, share) for run, diagnosis in zip(runs, found, strict=True)]
    comparison = compare_trainings(runs, found).as_data() if len(runs) > 1 else None
    return {"runs": packed, "comparison": comparison}


def render_live_page(only: str | None) -> str:
    """The page as `gradproof live` serves it: without data, which it asks the server for."""
    return assemble({"live": True, "only": only}, title="gradproof live", text="This page needs JavaScript.")


def assemble(data: dict[str, Any], title: str, text: str) -> str:
    """The parts of the page with data in them."""
    script = '"use strict";\n' + "\n".join(read_part(name) for name in SCRIPTS)
    style = read_part("page.css")
    fetched = "connect-src 'self'; " if data.get("live") else ""
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; {fetched}"
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": policy,
        "title": html.escape(title),
        "style": style,
        "text": html.escape(text),
        "data": json_for_script(data),
        "script": script,
    }
    # in one pass: what a run says, its name too, is not searched again
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], read_part("page.html"))


def json_for_script(data: dict[str, Any]) -> str:
    """JSON that cannot end the element it stands in."""
    return json.dumps(json.loads(json_line(data)), separators=(",", ":")).replace("<", "\\u003c")


def read_part(name: str) -> str:
    return (PARTS / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
