"""Watches a process that gradproof did not start: Python runs this file at its start where the folder is on PYTHONPATH.

`gradproof run` puts it there for the processes of its script; `gradproof attach` prints it. It does nothing but wait
for `import torch`, takes itself out of sight, runs the sitecustomize that it stands in front of, and never fails:
whatever Python this is, and whether or not gradproof can be found.
"""

import os
import sys


class AfterTorch:
    """Lets torch be imported as ever, and looks in when that is done."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        import importlib.util

        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return spec
        loader, execute = spec.loader, spec.loader.exec_module

        def exec_module(module):
            del loader.exec_module
            execute(module)
            attach()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def attach():
    try:
        load_gradproof()
        from gradproof.probes.autoload import attach_if_asked
    except Exception as error:
        sys.stderr.write("gradproof cannot watch process %d: %s\n" % (os.getpid(), error))  # noqa: UP031
    else:
        attach_if_asked()


def load_gradproof():
    """The package that this file is a part of, wherever it lies."""
    if "gradproof" in sys.modules:
        return
    import importlib.util

    folder = os.path.dirname(HERE)
    file = os.path.join(folder, "__init__.py")
    spec = importlib.util.spec_from_file_location("gradproof", file, submodule_search_locations=[folder])
    assert spec is not None and spec.loader is not None
    sys.modules["gradproof"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(sys.modules["gradproof"])
    except BaseException:
        del sys.modules["gradproof"]
        raise


def give_way():
    """The sitecustomize of this environment, if it has one, is imported as if this one were not there."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != HERE]
    own = sys.modules.pop(__name__)
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if getattr(error, "name", "sitecustomize") != "sitecustomize":
            raise
        sys.modules[__name__] = own
    except BaseException:
        sys.modules[__name__] = own
        raise


HERE = os.path.dirname(os.path.abspath(__file__))
if os.environ.get("GRADPROOF") == "1" or (
    "GRADPROOF_RUN" in os.environ and os.environ.get("GRADPROOF") != "0"
):
    sys.meta_path.insert(0, AfterTorch())
give_way()
