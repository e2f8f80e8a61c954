"""smeltscope: see what the second visit of a looped transformer does."""

from importlib.metadata import PackageNotFoundError, version

from smeltscope.errors import SmeltscopeError
from smeltscope.lazy import lazily

try:
    __version__ = version("smeltscope")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0+unknown"

# Everything below imports torch or xarray, so it is loaded when first asked for:
# `probe --help` must answer at once.
_PLACES = {
    "capture": "smeltscope.activations.capture",
    "dyck": "smeltscope.api.dyck",
    "dyck_prompt": "smeltscope.api.dyck_prompt",
    "dyck_state": "smeltscope.api.dyck_state",
    "load_checkpoint": "smeltscope.model.load_checkpoint",
    "open": "smeltscope.activations.open_run",
    "plot": "smeltscope.api.plot",
    "probe": "smeltscope.api.probe",
    "summarize": "smeltscope.api.summarize",
    "tiny": "smeltscope.model.tiny",
}
__getattr__ = lazily(__name__, _PLACES)

__all__ = ["SmeltscopeError", "__version__", *_PLACES]  # noqa: PLE0604


def __dir__() -> list[str]:
    return sorted(__all__)
