"""What is done to a module of others as soon as a program imports it, which this package does not."""

import importlib.util
import sys
import threading
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _OnceImported(MetaPathFinder):
    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name, self._change = name, change
        self._asks = threading.local()  # the others, and itself again

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name or hasattr(self._asks, "now"):
            return None
        self._asks.now = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            del self._asks.now
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_change(module: ModuleType) -> None:
                if self in sys.meta_path:  # until now, as a spec may be asked for by who imports nothing
                    sys.meta_path.remove(self)
                execute(module)
                self._change(module)

            spec.loader.exec_module = execute_and_change
        return spec


def when_imported(name: str, change: Callable[[ModuleType], None]) -> None:
    """Changes the module now, or when it is imported, before anybody else sees it."""
    if name in sys.modules:
        change(sys.modules[name])
    else:
        sys.meta_path.insert(0, _OnceImported(name, change))
