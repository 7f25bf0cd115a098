"""One page a family of causes: it is what the catalogue says, and its script is sick and mended as it claims."""

import make_causes
import pytest

from gradproof.diagnosis.causes import CAUSES

FAMILIES = [cause.family for cause in CAUSES]


def test_there_is_a_page_and_a_script_for_every_family_and_no_other():
    assert {page.stem for page in make_causes.PAGES.glob("*.md")} == {*FAMILIES, "index"}
    assert {script.stem for script in make_causes.EXAMPLES.glob("*.py")} == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_page_says_what_the_catalogue_and_the_code_say(family):
    page = make_causes.PAGES / f"{family}.md"
    said = make_causes.said_on(page)
    assert page.read_text() == make_causes.render_page(family, said), "python docs/make_causes.py"
    assert said.startswith("1. problem · " + family + "/")


def test_the_index_is_of_the_catalogue():
    assert (make_causes.PAGES / "index.md").read_text() == make_causes.render_index()


def test_fixes_are_read_from_their_comments():
    text = '"""Prose of\ntwo lines."""\n\na = 1  # fix: a = 2\nb = 3\n    # fix: c = 4\nd = 5  # fix:\n'
    prose, broken, fixed = make_causes.split_example(text)
    assert prose == "Prose of two lines."
    assert broken == "a = 1\nb = 3\nd = 5\n" and fixed == "a = 2\nb = 3\n    c = 4\n"


def examine(family):
    _, broken, fixed = make_causes.split_example((make_causes.EXAMPLES / f"{family}.py").read_text())
    sick, mended = (make_causes.diagnose_script(family, code) for code in (broken, fixed))
    assert sick.worst == "problem" and sick.causes[0].family == family, str(sick)
    assert mended.steps == sick.steps and mended.worst != "problem", str(mended)


QUICK = "forward-nonfinite"


def test_a_script_is_sick_and_mended_as_its_page_says():
    examine(QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != QUICK])
def test_every_script_is_sick_and_mended_as_its_page_says(family):
    examine(family)
