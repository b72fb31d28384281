"""Runs a function when a library is imported: llamoe itself does not import peft, which takes seconds."""

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from types import ModuleType


def when_imported(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Call `callback(module)` when the module is imported; at once if it has been imported already.

    Python has no such hook, so a finder is added to `sys.meta_path`. It gets the module's spec from the other finders,
    makes the spec's loader call `callback` after the module's code, and then removes itself. `find_spec` of
    `importlib.util`, by which transformers looks for libraries, does not cause a call.
    """
    if name in sys.modules:
        callback(sys.modules[name])
        return

    class Finder(MetaPathFinder):
        is_searching = False

        def find_spec(self, fullname, path=None, target=None):
            if fullname != name or self.is_searching:
                return None
            # `importlib.util.find_spec` calls this, too.
            self.is_searching = True
            try:
                spec = importlib.util.find_spec(name)
            finally:
                self.is_searching = False
            if spec is not None and spec.loader is not None:
                execute = spec.loader.exec_module

                def exec_module(module: ModuleType) -> None:
                    execute(module)
                    if self in sys.meta_path:
                        sys.meta_path.remove(self)
                        callback(module)

                # This changes the loader of this spec alone, not its class.
                spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, Finder())
