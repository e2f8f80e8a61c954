"""loss: how well a model predicts, and what other numbers of visits make of the same checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from torch.nn.functional import log_softmax, pad

from smeltscope import activations
from smeltscope.activations import Variable, attributes_of
from smeltscope.errors import SmeltscopeError
from smeltscope.probes.labels import over_documents
from smeltscope.probes.positions import position_bins, position_edges
from smeltscope.probes.probe import Batch, ModelShape, Output, Probe
from smeltscope.probes.statistics import Quantities, Resampling, exact, quantities

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from smeltscope.model import SmeltForCausalLM

# Logits made at a time, tokens x vocabulary: more fall out of a processor's caches, fewer leave a GPU idle.
CHUNK = {"cpu": 1 << 22, "cuda": 1 << 26}

# The same weights with other numbers of visits, made once for each model.
_swept: WeakKeyDictionary[SmeltForCausalLM, dict[int, SmeltForCausalLM]] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Loss(Probe):
    """Cross-entropy of the next token, in nats.

    With p_q the model's distribution over the next token after tokens 0..q of a segment
    (softmax of its logits in float32), for each segment of n tokens:

    - `loss_sum` = - sum over q = 0..n-2 of ln p_q(token q + 1). All tokens but the first
      are predicted, the second from the first alone. `tokens` = n - 1.
    - `loss_by_position_sum`, `tokens_by_position`: the same for predictions from positions
      q in [0, 1), [1, 2), [2, 4), [4, 8), ...
    - `uniform_sum` = (n - 1) ln V: the loss of equal probability for all V tokens of the
      vocabulary.

    With `visits`, the same weights also run with other numbers of visits, 0 included, which
    leaves the looped layers out; the factor on the writes of looped layers stays as trained. For
    each number of visits:

    - `swept_loss_sum`: `loss_sum` at that number of visits.
    - `swept_kl_sum` = sum over q of KL(p_q || s_q) = sum over the vocabulary of
      p_q ln(p_q / s_q), with s_q the distribution at that number of visits: 0 at its own.

    Averages weight every predicted token alike. Source: ours; arXiv 2609.01343 trains a model
    for each number of visits instead.
    """

    visits: tuple[int, ...] = ()

    name = "loss"
    sites = ()
    reads_output = True

    def dimensions(self, shape: ModelShape) -> Mapping[str, np.ndarray]:
        return {
            "position": position_edges(shape.max_length)[:-1],
            "num_visits": np.array(self.visits, dtype=np.int64),
        }

    def variables(self, shape: ModelShape) -> Mapping[str, Variable]:
        by_position = ("segment", "position")
        variables = {
            "tokens": Variable(dims=("segment",), description="predicted tokens"),
            "loss_sum": Variable(
                dims=("segment",), description="loss, summed over tokens", units="nats"
            ),
            "uniform_sum": Variable(
                dims=("segment",), description="loss of a uniform guess, summed", units="nats"
            ),
            "tokens_by_position": Variable(
                dims=by_position, description="tokens predicted from this position on"
            ),
            "loss_by_position_sum": Variable(
                dims=by_position, description="loss_sum by predicting position", units="nats"
            ),
        }
        if self.visits:
            by_visits = ("segment", "num_visits")
            variables["swept_loss_sum"] = Variable(
                dims=by_visits, description="loss_sum at this number of visits", units="nats"
            )
            variables["swept_kl_sum"] = Variable(
                dims=by_visits,
                description="divergence from the model as it is, summed over tokens",
                units="nats",
            )
        return variables

    def observe_output(
        self, arrays: Mapping[str, np.ndarray], batch: Batch, output: Output
    ) -> None:
        length = batch.input_ids.shape[1]
        positions = torch.arange(length, device=batch.input_ids.device)
        predicts = positions < batch.lengths[:, None] - 1  # (B, T)
        runs = [(output.hidden, output.logits)]
        runs += [_swept_run(output, visits, batch.input_ids) for visits in self.visits]
        loss, divergence, vocabulary = measure_loss(runs, batch.input_ids, predicts)
        in_bin = position_bins(length, positions.device)  # (T, bin)
        tokens = predicts.float()
        measured = {
            "tokens": tokens.sum(1),
            "loss_sum": loss[0].sum(1),
            "uniform_sum": tokens.sum(1) * np.log(vocabulary),
            "tokens_by_position": tokens @ in_bin,
            "loss_by_position_sum": loss[0] @ in_bin,
        }
        if self.visits:
            measured["swept_loss_sum"] = loss[1:].sum(2).T
            measured["swept_kl_sum"] = divergence[1:].sum(2).T
        for name, values in measured.items():
            if "by_position" in name:  # no token stands in the bins beyond this batch
                values = pad(values, (0, arrays[name].shape[1] - values.shape[1]))
            arrays[name][:] = values.cpu()

    def check(self, model: PreTrainedModel) -> None:
        from smeltscope.model import SmeltForCausalLM

        if self.visits and not isinstance(model, SmeltForCausalLM):
            raise SmeltscopeError(
                f"{type(model).__name__} runs with its own number of visits only; a sweep needs a SMELT or its "
                "Baseline, so leave --visits out."
            )
        if self.visits and (model.tp_size not in (None, 1) or hasattr(model, "hf_device_map")):
            raise SmeltscopeError(
                "A model that is spread over devices or processes runs with its own number of visits only; sweep it "
                "on one device, without --device-map and --tensor-parallel."
            )

    def progress(
        self, arrays: Mapping[str, np.ndarray], shape: ModelShape
    ) -> Mapping[str, tuple[float, float]]:
        return {"loss": (float(arrays["loss_sum"].sum()), float(arrays["tokens"].sum()))}

    def estimates(self, run: xr.DataTree, resampling: Resampling) -> Quantities:
        """Without dimensions: `loss`, `uniform`, `tokens`. Over (num_visits), where visits were swept: `swept_loss`,
        `swept_change` (swept minus `loss`, paired by document), `swept_kl`, and `own_visits` of the model as it is. Over
        (position): `loss_by_position`, `tokens_by_position`.
        """
        data = run["loss"].dataset
        values = {str(name): array.values for name, array in data.data_vars.items()}
        tokens, by_position = values["tokens"], values["tokens_by_position"]
        overall = {
            "loss": resampling.ratio(values["loss_sum"], tokens),
            "uniform": resampling.ratio(values["uniform_sum"], tokens),
            "tokens": exact(tokens.sum()),
        }
        binned = {
            "loss_by_position": resampling.ratio(values["loss_by_position_sum"], by_position),
            "tokens_by_position": exact(by_position.sum(0)),
        }
        swept = {}
        if "swept_loss_sum" in values:
            overall["own_visits"] = exact(attributes_of(run)["model_config"]["num_visits"])
            change = values["swept_loss_sum"] - values["loss_sum"][:, None]
            swept = {
                "swept_loss": resampling.ratio(values["swept_loss_sum"], tokens),
                "swept_change": resampling.ratio(change, tokens),
                "swept_kl": resampling.ratio(values["swept_kl_sum"], tokens),
            }
        return {
            **quantities((), overall),
            **quantities(("num_visits",), swept),
            **quantities(("position",), binned),
        }

    def sentence(self, summary: xr.Dataset) -> str:
        def value(name: str, part: xr.Dataset = summary, sign: str = "") -> str:
            number, low, high = (float(part[f"{name}{end}"]) for end in ("", "_low", "_high"))
            shown = f"{number:{sign}.4f}"
            return f"{shown} [{low:{sign}.4f}, {high:{sign}.4f}]" if np.isfinite(low) else shown

        text = (
            f"Mean loss of {int(summary['tokens'])} predicted tokens: {value('loss')} nats; a uniform guess: "
            f"{float(summary['uniform']):.4f}; {over_documents(summary)}."
        )
        if "swept_loss" not in summary:
            return text
        own = int(summary["own_visits"])
        others = "; ".join(
            f"{n}: {value('swept_change', part, '+')}, divergence {value('swept_kl', part)}"
            for n in summary["num_visits"].values
            if n != own and (part := summary.sel(num_visits=n))
        )
        return (
            f"{text} Change of loss from its own {own} visit{'s' * (own != 1)}, by number of visits: "
            f"{others or 'no other was run'}."
        )


# Hidden states (B, T, width), and the head that makes logits of them.
Decoded = tuple[Tensor, Callable[[Tensor], Tensor]]


def measure_loss(
    runs: Sequence[Decoded], input_ids: Tensor, predicts: Tensor
) -> tuple[Tensor, Tensor, int]:
    """The loss of each run, its divergence from the first, and the size of the vocabulary.

    Both are (run, B, T), at the predicting position, and 0 where `predicts` (B, T) is False.
    """
    loss, divergence = torch.zeros(2, len(runs), *predicts.shape, device=input_ids.device)
    rows, positions = predicts.nonzero(as_tuple=True)
    hidden, head = runs[0]
    vocabulary = head(hidden[:1, :1]).shape[2]
    size = max(1, CHUNK.get(hidden.device.type, CHUNK["cuda"]) // vocabulary)
    for row, position in zip(rows.split(size), positions.split(size), strict=True):
        target = input_ids[row, position + 1][:, None]
        for run, (hidden, head) in enumerate(runs):
            logits = head(hidden[row, position][None])[0]
            log_p = log_softmax(logits, dim=1, dtype=torch.float32)  # (n, vocabulary)
            loss[run, row, position] = -log_p.gather(1, target)[:, 0]
            if run == 0:
                own = log_p
            else:
                divergence[run, row, position] = (own.exp() * (own - log_p)).sum(1)
    return loss, divergence, vocabulary


def _swept_run(output: Output, visits: int, input_ids: Tensor) -> Decoded:
    from smeltscope.model import SmeltForCausalLM, with_visits

    model = output.model
    assert isinstance(model, SmeltForCausalLM)  # `check` has seen to it
    if visits == model.config.num_visits:
        return output.hidden, output.logits
    known = _swept.setdefault(model, {})
    if visits not in known:
        known[visits] = with_visits(model, visits)
    decoded = activations.decode(known[visits], input_ids)
    return decoded.last_hidden_state, activations.head_of(known[visits], decoded)
