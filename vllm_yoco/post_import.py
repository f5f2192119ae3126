"""Run something right after a module has been imported, without importing it now.

vLLM loads plugins in processes that never need most of it (``vllm --help``, the front end), so the plugin
may not import a runner only to change it. Waiting for vLLM's own import costs nothing there and is early
enough everywhere.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

Action = Callable[[], None]


def after_import(module_name: str, action: Action) -> None:
    """Call ``action`` once ``module_name`` is complete: now if it is, otherwise at the end of its import.

    Raises:
        RuntimeError: the module is being imported right now: too late to hook and too early to act.
    """
    module = sys.modules.get(module_name)
    if module is None:
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
        _finder.actions.setdefault(module_name, []).append(action)
    elif is_complete(module):
        action()
    else:
        raise RuntimeError(f"{module_name} is only half imported")


def is_complete(module: ModuleType) -> bool:
    return not getattr(module.__spec__, "_initializing", False)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.actions: dict[str, list[Action]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        # Taken out first: the look-up below comes back through this finder.
        actions = self.actions.pop(fullname, None)
        if actions is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            self.actions[fullname] = actions
            return None
        spec.loader = _Loader(spec.loader, actions)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, actions: list[Action]) -> None:
        self.loader, self.actions = loader, actions

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        assert module.__spec__ is not None
        module.__spec__.loader = self.loader  # the module looks as if nobody had been here
        self.loader.exec_module(module)
        # The module is whole, but import has not said so yet, and actions may import it again.
        module.__spec__._initializing = False  # type: ignore[attr-defined]
        for action in self.actions:
            action()


_finder = _Finder()
