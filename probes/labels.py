"""What the labels of a run, and of its summary, say."""

import numpy as np
import xarray as xr


def over_documents(summary: xr.Dataset) -> str:
    """`over 7 documents`, for a sentence."""
    number = summary.attrs["documents"]
    return f"over {number} document{'s' * (number != 1)}"


def executions_of_pairs(data: xr.Dataset) -> np.ndarray:
    """The executions of both visits of each pair, -1 where a layer has no such visit: (looped_layer, visit_pair, 2).

    `data` is a group of a run, or its root, with the labels `layer`, `visit`, `looped_layer`, `visit_a`, `visit_b`.
    """
    places = zip(data["layer"].values, data["visit"].values, strict=True)
    execution = {place: index for index, place in enumerate(places)}
    pairs = list(zip(data["visit_a"].values, data["visit_b"].values, strict=True))
    return np.array(
        [
            [[execution.get((layer, visit), -1) for visit in pair] for pair in pairs]
            for layer in data["looped_layer"].values
        ]
    )


def looped_by_visit(data: xr.Dataset) -> dict[int, np.ndarray]:
    """The executions at each visit of layers that run more than once, of all layers where none does: {visit: (n,)}."""
    layers, visits = data["layer"].values, data["visit"].values
    later = visits > 1
    inside = np.isin(layers, layers[later]) if later.any() else np.ones(len(layers), dtype=bool)
    return {
        int(visit): np.flatnonzero(inside & (visits == visit))
        for visit in np.unique(visits[inside])
    }
