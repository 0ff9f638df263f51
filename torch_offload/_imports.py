"""What is done to a module of others as soon as a program imports it, which this package does not."""

import importlib.util
import sys
import threading
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Loader:
    """What a module is loaded by, which may serve others too, with something to do behind it."""

    def __init__(self, loader: Any, then: Callable[[ModuleType], None]) -> None:
        self._loader, self._then = loader, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then(module)


class _OnceImported(MetaPathFinder):
    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name, self._change = name, change
        self._asks = threading.local()  # the others, and itself again

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name or name in sys.modules or hasattr(self._asks, "now"):
            return None
        self._asks.now = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            del self._asks.now
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, self._executed)
        return spec

    def _executed(self, module: ModuleType) -> None:
        self._change(module)
        # Only now: a spec may be asked for by who imports nothing, and an import that fails may be tried again.
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def when_imported(name: str, change: Callable[[ModuleType], None]) -> None:
    """Changes the module now, or when it is imported, before anybody else sees it."""
    if name in sys.modules:
        change(sys.modules[name])
    else:
        sys.meta_path.insert(0, _OnceImported(name, change))
