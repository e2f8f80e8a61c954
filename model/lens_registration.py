"""Registers SMELT with TransformerLens as soon as, and only if, TransformerLens is imported.

The package's entry point alone comes too late: TransformerLens' loader looks the architecture up in
a table of its own before it reads entry points. That table can only be extended once it exists,
and importing TransformerLens takes seconds, too long for those who never use it.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

TABLE = "transformer_lens.factories.architecture_adapter_factory"


class _RegisteringLoader(Loader):
    """The module's own loader, then our registration."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        _register()


class _TableFinder(MetaPathFinder):
    """Finds the one module that holds TransformerLens' table of architectures."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != TABLE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


def _register() -> None:
    import_module("smeltscope.model.lens")  # registers at its end


def register_with_transformer_lens() -> None:
    """Register now if TransformerLens is imported already, otherwise when it is."""
    if TABLE in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _TableFinder())
