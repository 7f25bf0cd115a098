"""The house rules of the design that a machine can hold: who imports whom, and what an import costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "gradproof"
STANDARD = set(sys.stdlib_module_names)

# package -> what it may import besides the standard library and itself (see DESIGN in docs/)
MAY_IMPORT = {
    "numerics": {"torch", "numpy"},
    "kernels": {"torch", "triton", "numerics"},
    "check": {"torch", "numpy", "numerics"},
    "tape": {"torch", "numpy", "numerics", "safetensors"},
    "record": {"numpy", "pyarrow"},
    "probes": {"torch", "numpy", "kernels", "tape", "record"},
    "instruments": {"torch", "numpy", "tape", "numerics"},
    "experiments": {"torch", "numpy", "instruments", "tape", "check", "numerics", "record"},
    "examination": {"torch", "record", "diagnosis", "experiments", "instruments", "tape"},
    "diagnosis": {"numpy", "record"},
    "report": {"numpy", "record", "diagnosis"},
    "ask": {
        "torch",
        "numpy",
        "tape",
        "instruments",
        "experiments",
        "examination",
        "record",
        "diagnosis",
        "report",
    },
    "lm": {"torch", "numpy", "kernels", "safetensors", "tokenizers"},
    "faults": {"torch", "numpy", "lm"},
    "integrations": {
        "numpy",
        "probes",
        "record",
        "transformers",
        "lightning",
        "accelerate",
        "tensorboard",
        "wandb",
        "mcp",
        "anyio",
        "pydantic",
        "ask",
    },
}

# top-level module -> the same
MODULES_MAY_IMPORT = {
    "errors": set(),
    "children": set(),
    "files": set(),
    "fixtures": {"pytest", "probes", "diagnosis", "report", "testing"},
    "notebook": {"IPython", "commands", "probes", "diagnosis", "report", "record"},
    "sanity": {"torch", "check", "numerics"},
    "testing": {"torch", "check", "hypothesis", "ask", "instruments", "tape", "probes", "record"},
}


def imported(path: Path) -> set[str]:
    """Third-party packages, and gradproof's own packages by their short name, that a file imports."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    found = set()
    for name in names:
        head, *rest = name.split(".")
        if head == "gradproof":
            found.add(rest[0] if rest else "gradproof")
        elif head not in STANDARD:
            found.add(head)
    return found


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_packages_import_only_what_the_design_allows(package):
    for path in sorted((SOURCE / package).rglob("*.py")):
        extra = imported(path) - MAY_IMPORT[package] - {package, "errors", "children", "files", "__version__"}
        assert not extra, f"{path.relative_to(SOURCE)} imports {sorted(extra)}"


@pytest.mark.parametrize("module", sorted(MODULES_MAY_IMPORT))
def test_top_level_modules_import_only_what_they_need(module):
    extra = imported(SOURCE / f"{module}.py") - MODULES_MAY_IMPORT[module] - {"errors"}
    assert not extra, f"{module}.py imports {sorted(extra)}"


def test_testing_needs_hypothesis_only_where_it_is_used():
    tree = ast.parse((SOURCE / "testing.py").read_text())
    at_import = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not any("hypothesis" in ast.unparse(node) for node in at_import)


def test_the_fixture_costs_other_test_suites_nothing():
    """pytest loads it wherever gradproof is installed."""
    code = (
        "import pytest, sys, gradproof.fixtures; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_package_init_files_are_empty(package):
    assert all(path.read_text() == "" for path in (SOURCE / package).rglob("__init__.py"))


def test_import_is_light():
    """Of gradproof the commands' parsers alone, and nothing that is not Python's own."""
    code = "import sys; before = {*sys.modules}; import gradproof.cli; print(*({*sys.modules} - before))"
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    own = {name for name in loaded if name.split(".")[0] == "gradproof"}
    rooms = {"cli", "commands", "children", "errors", "files"}
    assert {name.split(".")[1] for name in own if "." in name} <= rooms
    assert {name.split(".")[0] for name in loaded} - STANDARD <= {"gradproof"}
