"""smeltscope: see what the second visit of a looped transformer does."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from smeltscope.errors import SmeltscopeError

try:
    __version__ = version("smeltscope")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0+unknown"

# Everything below imports torch or xarray, so it is loaded when first asked for:
# `probe --help` must answer at once.
_LAZY = {
    "capture": ("smeltscope.activations", "capture"),
    "dyck": ("smeltscope.api", "dyck"),
    "dyck_prompt": ("smeltscope.api", "dyck_prompt"),
    "dyck_state": ("smeltscope.api", "dyck_state"),
    "load_checkpoint": ("smeltscope.model", "load_checkpoint"),
    "open": ("smeltscope.activations", "open_run"),
    "plot": ("smeltscope.api", "plot"),
    "probe": ("smeltscope.api", "probe"),
    "summarize": ("smeltscope.api", "summarize"),
    "tiny": ("smeltscope.model", "tiny"),
}

__all__ = ["SmeltscopeError", "__version__", *_LAZY]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module, attribute = _LAZY[name]
        return getattr(import_module(module), attribute)
    raise AttributeError(f"module 'smeltscope' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
