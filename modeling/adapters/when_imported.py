"""A callback for the import of a library, since importing it early would take seconds."""

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from types import ModuleType


def when_imported(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Call `callback(module)` once the module is imported, or at once if it already is.

    The standard library has no such hook. This import finder gets the module's spec from the other finders, and makes
    its loader run the callback after the module's code; then it removes itself. `find_spec` alone, as transformers
    calls it, has no effect.
    """
    if name in sys.modules:
        callback(sys.modules[name])
        return

    class Finder(MetaPathFinder):
        asking_others = False

        def find_spec(self, fullname, path=None, target=None):
            if fullname != name or self.asking_others:
                return None
            self.asking_others = True
            try:
                spec = importlib.util.find_spec(name)
            finally:
                self.asking_others = False
            if spec is not None and spec.loader is not None:
                execute = spec.loader.exec_module

                def exec_module(module: ModuleType) -> None:
                    execute(module)
                    if self in sys.meta_path:
                        sys.meta_path.remove(self)
                        callback(module)

                # This patches only the loader instance of this module's spec.
                spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, Finder())
