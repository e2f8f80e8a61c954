"""With every probe on, the model computes what it computes alone, bit for bit."""

import numpy as np
import pytest
import torch

from smeltscope.probes import Probe, RunOptions
from smeltscope.probes.runner import Measurement, model_shape
from smeltscope.registry import PROBES, make_probe
from smeltscope.tasks import pad_batch

LENGTHS = [40, 70, 2, 33, 1]
OPTIONS = RunOptions(max_length=70, batch_tokens=70 * len(LENGTHS))
ROWS = np.arange(len(LENGTHS))  # one forward, padded to the longest
MODELS = {
    "smelt": {},
    "smelt, three visits": {"num_visits": 3},
    "llama": {},
    "qwen3_moe": {},
    "olmoe": {},
    "dory": {},
    "hrm_text": {},
}


class Keep(Probe):
    """Holds what the watched forward gave."""

    name = "keep"
    sites = ()
    reads_output = True

    def __init__(self):
        self.kept = {}

    def variables(self, shape):
        return {}

    def observe_output(self, arrays, batch, output):
        self.kept = {
            "ids": batch.input_ids,
            "hidden": output.hidden,
            "logits": output.logits(output.hidden),
        }

    def estimates(self, run, resampling):
        return {}


@pytest.fixture
def measure(make_checkpoint, make_heldout):
    """Every probe, with options where some are given, over one batch: (checkpoint, what to call)."""

    def prepare(model, *, dtype=torch.float32, more=(), **options):
        checkpoint = make_checkpoint(model.split(",")[0], dtype=dtype, **MODELS[model])
        heldout = make_heldout(LENGTHS)
        probes = [*(make_probe(name, **options.get(name, {})) for name in PROBES), *more]
        shape = model_shape(checkpoint, heldout, OPTIONS.max_length)
        measurement = Measurement(checkpoint, heldout, probes, OPTIONS, shape)
        ids = torch.from_numpy(pad_batch(heldout, ROWS, pad_token=0)[0])
        return checkpoint.model, ids, lambda: measurement(ROWS)

    return prepare


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_bits_of_the_bare_forward(measure, name, dtype):
    keep = Keep()
    model, ids, run = measure(name, dtype=dtype, more=[keep])
    assert model.config._attn_implementation == "sdpa"
    with torch.no_grad():
        hidden = model.get_decoder()(input_ids=ids).last_hidden_state
        logits = model(input_ids=ids).logits
    arrays, _ = run()
    assert arrays.keys() == {name.replace("-", "_") for name in (*PROBES, "keep")}
    assert torch.equal(keep.kept["ids"], ids)
    assert next(model.parameters()).dtype == dtype and logits.isfinite().all()
    assert torch.equal(keep.kept["hidden"], hidden)
    assert torch.equal(keep.kept["logits"], logits)


@pytest.mark.parametrize("name", MODELS)
def test_the_model_afterwards(measure, name):
    """Weights and a second forward are what they were; the sweep over visits shares its weights."""
    sweep = {"loss": {"visits": (0, 1, 4)}} if name.startswith("smelt") else {}
    model, ids, run = measure(name, **sweep)
    weights = {n: (w, w.data_ptr(), w.clone()) for n, w in model.state_dict().items()}
    with torch.no_grad():
        before = model(input_ids=ids).logits
    run()
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, before)
    after = model.state_dict()
    assert after.keys() == weights.keys()
    for n, (_, place, value) in weights.items():
        assert after[n].data_ptr() == place and torch.equal(after[n], value), n
    assert not model.training and all(p.grad is None for p in model.parameters())
