"""Names of a package that are loaded when they are first asked for.

Importing torch and transformers takes seconds: who looks at finished runs needs little of them.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package: `places` says where each name is found, as `package.module.attribute`."""

    def load(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, attribute = places[name].rpartition(".")
        value = getattr(import_module(module), attribute)
        setattr(sys.modules[package], name, value)
        return value

    return load
