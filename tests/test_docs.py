"""What the README and the docs show runs, and what they name exists."""

import inspect
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
from pages import blocks_of, run_page

import gradproof
from gradproof import cli

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(p for p in DOCS.rglob("*.md") if p.parent.name != "causes")]
SHELF = ("CONTRIBUTING.md", "CHANGELOG.md")
PACKAGES = sorted(p.parent for p in (ROOT / "src" / "gradproof").glob("*/__init__.py"))

TRAIN = '''"""A small training, for pages that run a `train.py` of their reader's."""

import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.05)
lr = parser.parse_args().lr
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=lr)
for _ in range(40):
    x = torch.randn(16, 4)
    optimizer.zero_grad()
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
'''


@pytest.fixture
def reader(tmp_path):
    """A directory as a reader of the docs has it: with a training script, and the same as a module."""
    (tmp_path / "package").mkdir()
    for name in ("train.py", "package/train.py", "package/__init__.py"):
        (tmp_path / name).write_text(TRAIN if name.endswith("train.py") else "")
    return tmp_path


def name_of(page):
    return str(page.relative_to(ROOT))


SHOWN = [p for p in PAGES if blocks_of(p)]


@pytest.mark.parametrize(
    "page", [SHOWN[0], *(pytest.param(p, marks=pytest.mark.slow) for p in SHOWN[1:])], ids=name_of
)
def test_what_a_page_shows_runs(page, reader):
    """In one directory, in the order of the page: a block may use what the ones before it made."""
    if any(block.language == "c" for block in blocks_of(page)) and not shutil.which("cc"):
        pytest.skip("there is no C compiler here (cc)")
    run_page(page, reader)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(b.note == "slow" for b in blocks_of(p))], ids=name_of
)
def test_the_long_commands_of_a_page_run(page, reader):
    run_page(page, reader, slow=True)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_of_a_kind_that_is_run_or_says_why_not(page):
    known = {"python", "sh", "diff", "text", ""}
    for block in blocks_of(page):
        if block.language == "c" and block.title:  # compiled by the commands after it
            continue
        assert block.language in known, f"{page.name}: nothing runs ```{block.language}"
        assert not block.note or block.note == "slow" or block.note.startswith("not run: "), block.note
        if block.language == "":
            assert not re.search(r"^(\$ )?(gradproof|python|pip|make) ", block.text, re.M), "say ```sh"


def test_there_are_blocks_to_run():
    run = [b for page in PAGES for b in blocks_of(page) if not b.note and b.language in ("python", "sh")]
    assert len(run) >= 30


def test_a_page_may_stand_on_another(tmp_path):
    (tmp_path / "first.md").write_text('```python title="a.py"\nA = 1\n```\n')
    page = tmp_path / "page.md"
    page.write_text("# Page\n<!-- after: first.md -->\n\n```python\nimport a\nassert a.A == 1\n```\n")
    run_page(page, tmp_path)
    page.write_text("# Page\n\n```python\nimport nowhere\n```\n")
    with pytest.raises(AssertionError, match="exit code 1"):
        run_page(page, tmp_path)


INSTRUMENTS = [page for page in PAGES if page.parent.name == "instruments" and page.stem != "index"]


@pytest.mark.parametrize("page", INSTRUMENTS, ids=name_of)
def test_each_instrument_has_one_picture_of_what_it_shows(page):
    (picture,) = re.findall(r"^!\[[^\]]+\]\((.+\.svg)\)$", page.read_text(), re.M)
    drawn = ElementTree.parse(page.parent / picture).getroot()
    assert drawn.tag.endswith("svg") and len(list(drawn.iter())) > 10
    assert f"]({page.name})" in (page.parent / "index.md").read_text()


def test_every_module_of_instruments_is_on_the_page_of_all():
    listed = (DOCS / "instruments" / "index.md").read_text()
    named = set(re.findall(r"`(?:instruments\.)?(\w+)`", listed))
    modules = {path.stem for path in (ROOT / "src" / "gradproof" / "instruments").glob("[!_]*.py")}
    assert modules - named - {"evidence", "flow", "grids", "gains", "moved"} == set()


def test_a_page_that_shows_what_was_not_said_fails(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```sh\necho lr-too-high/overshoot\n```\n\n```text\nlr-too-low/tiny-steps\n```\n")
    with pytest.raises(AssertionError, match="lr-too-low/tiny-steps"):
        run_page(page, tmp_path)
    page.write_text("```sh\nfalse\n```\n")
    with pytest.raises(AssertionError, match="exit code 1"):
        run_page(page, tmp_path)
    page.write_text("```python\nassert 1 == 2\n```\n")
    with pytest.raises(AssertionError, match="exit code 1"):
        run_page(page, tmp_path)


def anchors_of(page):
    """What a link may name on a page: its headings in small letters, spaces as dashes, nothing but words."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    for page in [*PAGES, *(ROOT / name for name in SHELF), *(DOCS / "causes").glob("*.md")]:
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
            if anchor:
                there = page.parent / target if target else page
                assert anchor in anchors_of(there), f"{page.name} links to {target}#{anchor}"


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r'"([\w/-]+\.md)"', (ROOT / "zensical.toml").read_text()))
    assert listed == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


def test_the_api_page_has_every_name_and_argument():
    text = " ".join((DOCS / "api.md").read_text().split())
    for name in gradproof._HOME:
        thing = getattr(gradproof, name)
        if isinstance(thing, type):
            assert f"`{name}`" in text
            continue
        shown = re.search(rf"`{name}\(([^`]*)\)`", text)
        assert shown, f"api.md does not show {name}(...)"
        parameters = inspect.signature(thing).parameters
        assert re.findall(r"(\w+)(?:=|,|$)", re.sub(r"\*|=[^,]+", "", shown[1])) == list(parameters), name


def test_the_api_page_has_every_command():
    text = (DOCS / "api.md").read_text()
    commands = {add.__name__.removeprefix("add_").replace("_", "-") for add in cli.COMMANDS}
    assert set(re.findall(r"^\| `gradproof ([\w-]+)`", text, re.M)) == commands


def test_the_tree_is_the_tree():
    text = (DOCS / "design.md").read_text()
    tree = text[text.index("## The house") :].split("```")[1]
    named = dict(re.findall(r"^  (\w+)/ +(.*)$", tree, re.M))
    filled = {p.name for p in PACKAGES if any(f.name != "__init__.py" for f in p.glob("*.py"))}
    assert filled <= set(named) <= {p.name for p in PACKAGES} | {"include"}
    for package, files in named.items():
        shown = set(re.findall(r"[a-z_]+", files.partition(":")[2]))
        folder = ROOT / "src" / "gradproof" / package
        there = {f.stem for f in folder.glob("*.py")} | {f.parent.name for f in folder.glob("*/*.py")}
        assert shown <= there, f"{package}: {sorted(shown - there)} are not there"


def test_every_package_is_in_the_table_of_imports():
    design = (DOCS / "design.md").read_text()
    assert {p.name for p in PACKAGES} <= set(re.findall(r"^\| (\w+) \|", design, re.M))


def test_make_run_is_the_demo_that_the_readme_promises():
    (recipe,) = re.findall(r"^run: .*\n\t@\$\(BIN\)/(.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert recipe == "gradproof demo"
    assert re.search(r"^make run +# gradproof demo:", (ROOT / "README.md").read_text(), re.M)


def test_the_demo_plants_a_fault_that_exists():
    from gradproof.commands.watching import DEMO
    from gradproof.faults.catalogue import FAULTS

    assert DEMO in {fault.name for fault in FAULTS}
