"""dyck-scores: how many Dyck prompts are answered right, by number of demonstrations, and what guessing would give."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from torch.nn.functional import log_softmax

from smeltscope import activations
from smeltscope.activations import Variable
from smeltscope.errors import SmeltscopeError
from smeltscope.probes.loss import CHUNK
from smeltscope.probes.probe import Batch, ModelShape, Output, Probe, PromptBatch
from smeltscope.probes.prompts import by_item, count_items
from smeltscope.probes.sampling import Sample
from smeltscope.probes.statistics import (
    Estimate,
    Quantities,
    Resampling,
    exact,
    quantities,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MORE_TOKENS = 8  # that generation may take beyond those of the gold answer

# Where a prompt stands along a dimension: the array's name, the dimension, and what it is.
PLACES = {
    "of_shots": ("shots", "the prompt's number of demonstrations"),
    "of_seed": ("prompt_seed", "the seed that they were drawn with"),
    "of_readable": ("readable", "whether every closer of the answer stands in the query's input"),
}

# Answers that use the grammar and not the model, by what is known of which closer belongs to which opener.
GUESSES = ("bayes_nothing", "bayes_query", "bayes_inputs", "bayes_answers", "guess")
# What is known of the prompts themselves: the chance of such answers, and demonstrations left after truncation.
REFERENCES = (*GUESSES, "most_common", "kept_shots")


@dataclass(frozen=True, kw_only=True)
class DyckScores(Probe):
    """Whether prompts are answered right, in three ways, for each segment: a prompt and its gold answer.

    Under teacher forcing, with p_q the model's distribution over the next token after tokens 0..q (softmax of its logits
    in float32) and the answer at positions a..n-1:

    - `answer_tokens` = n - a. `right_tokens`: those that are the argmax of p at the position before. `all_right`: 1 if
      every one is (DCLM's score), else 0.
    - `symbols`: tokens of the answer that bear a bracket; `right_symbols`: those of them that are the argmax.
    - `loss_sum` = - sum over q = a-1..n-2 of ln p_q(token q + 1), in nats.

    By generation:

    - `exact`: 1 if greedy generation from tokens 0..a-1 gives the answer's text, else 0. It ends before `stop` (a line
      break), at an end token of the model, after n - a + 8 tokens, or with the model's context. White space around the text
      is stripped; brackets are compared as they are. Another tokenization of the same text is right.

    `of_shots`, `of_seed`, `of_readable` are 1 in the prompt's own place and 0 in others. A prompt without an answer has
    NaN. Prompts weigh alike, tokens alike in the loss per token. What to hold it against
    stands beside it, over the same prompts: `bayes_nothing`, `bayes_query`, `bayes_inputs`, `bayes_answers`, the chance that
    the best guess of the whole answer is right where grammar and stack are known but not which closer
    belongs to which opener, given nothing, the query's closed pairs, those of demonstration inputs too, and those of
    demonstration answers too; `most_common`, always the most common answer; `guess`, length known and type uniform,
    c^-n for n symbols of c choices. Each of them but `most_common` has a symbol accuracy, in which a symbol is guessed given
    those before it, and a loss of the answer, - ln of the chance, the least that can be expected. Source:
    DCLM (arXiv 2406.11794) for `all_right`; arXiv 2609.01343 reports exact match.
    """

    name = "dyck-scores"
    resampled = "items"
    sites = ()
    reads_output = True

    def dimensions(self, shape: ModelShape) -> Mapping[str, np.ndarray]:
        if not shape.shots:
            return {}
        return {"readable": np.arange(2)}

    def variables(self, shape: ModelShape) -> Mapping[str, Variable]:
        if not shape.shots:
            return {}
        described = {
            "answer_tokens": "tokens of the gold answer",
            "right_tokens": "answer tokens that are the argmax under teacher forcing",
            "all_right": "1 if every answer token is the argmax",
            "symbols": "answer tokens that bear a bracket",
            "right_symbols": "those of them that are the argmax",
            "loss_sum": "loss of the gold answer, summed over its tokens",
            "exact": "1 if greedy generation gives the answer's text",
        }
        units = {"loss_sum": "nats"}
        variables = {
            name: Variable(dims=("segment",), description=text, units=units.get(name, "1"))
            for name, text in described.items()
        }
        for name, (dim, what) in PLACES.items():
            variables[name] = Variable(dims=("segment", dim), description=f"1 at {what}")
        return variables

    def observe_output(
        self, arrays: Mapping[str, np.ndarray], batch: Batch, output: Output
    ) -> None:
        if batch.prompts is None:
            return
        answer, targets = batch.prompts.answer, batch.prompts.targets
        last = (batch.lengths - 1)[:, None]
        rows = Sample(  # of the answer's tokens, and of what follows it
            positions=torch.cat([(answer.positions - 1).clamp(min=0), last], dim=1),
            valid=torch.cat([answer.valid, torch.ones_like(last, dtype=torch.bool)], dim=1),
        )
        predicted, loss = predictions(output, batch.input_ids, rows)
        right = (predicted[:, :-1] == answer.take(batch.input_ids)) & answer.valid  # (B, A)
        place = (targets.positions - answer.positions[:, :1]).clamp(min=0)
        tokens, right_tokens = answer.valid.sum(1), right.sum(1)
        measured = {
            "answer_tokens": tokens,
            "right_tokens": right_tokens,
            "all_right": right_tokens == tokens,
            "symbols": targets.valid.sum(1),
            "right_symbols": (right.gather(1, place) & targets.valid).sum(1),
            "loss_sum": loss[:, :-1].sum(1),
            "exact": generates_answer(output.model, batch, predicted, right),
        }
        shape, labels = batch.shape, batch.prompts.labels
        levels = {"shots": shape.shots, "prompt_seed": shape.prompt_seeds, "readable": range(2)}
        for name, (dim, _) in PLACES.items():
            arrays[name][:] = labels[dim][:, None] == np.array(levels[dim])
        answered = (tokens > 0).cpu()
        for name, values in measured.items():
            arrays[name][:] = values.cpu().float().where(answered, torch.nan)

    def progress(
        self, arrays: Mapping[str, np.ndarray], shape: ModelShape
    ) -> Mapping[str, tuple[float, float]]:
        names = {"all right": "all_right", "exact": "exact"} if shape.shots else {}
        return {
            label: (float(np.nansum(arrays[name])), float(np.isfinite(arrays[name]).sum()))
            for label, name in names.items()
        }

    def estimates(self, run: xr.DataTree, resampling: Resampling) -> Quantities:
        """Over the prompts of kind `scored`; intervals from drawing items again, each with all its shots and seeds, and by Clopper
        and Pearson for shares of exactly 0 or 1, of which all draws are alike.

        Over (shots): `all_right`, `exact`, the shares of prompts answered right; `symbol_accuracy`; `token_loss` and
        `answer_loss`, nats for each token and each answer; the references `bayes_nothing`, `bayes_query`, `bayes_inputs`,
        `bayes_answers`, `guess`, `most_common`, and what each but the last has in the places of the three before:
        `symbol_accuracy_bayes_query`, `token_loss_guess`, ...; `kept_shots`, demonstrations left after
        truncation; how many `prompts` and `items` there are. `all_right_sd`, `exact_sd`: standard deviation over prompt seeds (n - 1) of
        `all_right_by_seed`, `exact_by_seed` over (shots, prompt_seed). Over (shots, readable): `all_right_by_readable`,
        `exact_by_readable`, the references' `..._by_readable`, `items_by_readable`: 1 where every closer of the answer already stands
        in the query's input.

        Of prompts of kind `nested`, over (shots): `nested_token_loss`, `nested_answer_loss`, their references
        `nested_token_loss_bayes_query`, ..., and how many `nested_prompts` and `nested_items` there are.
        """
        data, labels = run["dyck_scores"].dataset, run["segments"].dataset
        if "exact" not in data:
            return {}
        items = by_item(run, resampling)
        values = {str(name): array.values for name, array in data.data_vars.items()}
        known = (*REFERENCES, *(f"right_symbols_{guess}" for guess in GUESSES))
        if any(f"label_{name}" not in labels for name in known):
            raise SmeltscopeError(
                "An older smeltscope made this run, and left out what scores are held against; run probe dyck again."
            )
        values |= {name: labels[f"label_{name}"].values for name in known}
        values |= {f"loss_{guess}": -np.log(values[guess]) for guess in GUESSES}
        of_shots, of_seed, of_readable = (values[name] > 0 for name in PLACES)  # (segment, ...)
        scored, nested = (
            (labels["label_kind"].values == kind)[:, None] & of_shots
            for kind in ("scored", "nested")
        )
        by_seed = scored[..., None] & of_seed[:, None]  # (segment, shots, prompt_seed)
        by_readable = scored[..., None] & of_readable[:, None]

        def mean(name: str, groups: np.ndarray, per: str | None = None) -> Estimate:
            """Sum of an array / sum of another, or number of prompts, over the segments of each group."""
            shape = (-1, *[1] * (groups.ndim - 1))
            counts = groups if per is None else groups * values[per].reshape(shape)
            return items.ratio(np.where(groups, values[name].reshape(shape), 0.0), counts)

        rights = ("all_right", "exact")
        seeds = {f"{name}_by_seed": mean(name, by_seed) for name in rights}
        by_shots = {name: mean(name, scored) for name in (*rights, *REFERENCES)}
        by_shots |= {
            "symbol_accuracy": mean("right_symbols", scored, "symbols"),
            "token_loss": mean("loss_sum", scored, "answer_tokens"),
            "answer_loss": mean("loss_sum", scored),
            "nested_token_loss": mean("loss_sum", nested, "answer_tokens"),
            "nested_answer_loss": mean("loss_sum", nested),
            "prompts": exact(scored.sum(0)),
            "items": count_items(labels, scored),
            "nested_prompts": exact(nested.sum(0)),
            "nested_items": count_items(labels, nested),
        }
        for guess in GUESSES:
            right, loss = f"right_symbols_{guess}", f"loss_{guess}"
            by_shots |= {
                f"symbol_accuracy_{guess}": mean(right, scored, "symbols"),
                f"token_loss_{guess}": mean(loss, scored, "answer_tokens"),
                f"answer_loss_{guess}": mean(loss, scored),
                f"nested_token_loss_{guess}": mean(loss, nested, "answer_tokens"),
                f"nested_answer_loss_{guess}": mean(loss, nested),
            }
        by_shots |= {
            f"{name}_sd": exact(_spread(seeds[f"{name}_by_seed"].value)) for name in rights
        }
        parted = (*rights, *(name for name in REFERENCES if name != "kept_shots"))
        readable = {f"{name}_by_readable": mean(name, by_readable) for name in parted}
        asked = scored.any(0)[:, None]  # numbers of shots that only nested prompts have are not
        readable["items_by_readable"] = count_items(labels, by_readable).where(asked)
        asked_items = dict.fromkeys((*rights, "symbol_accuracy"), by_shots["items"])
        of_seed_items = dict.fromkeys(seeds, count_items(labels, by_seed))
        readable_items = {f"{name}_by_readable": readable["items_by_readable"] for name in rights}
        return {
            **quantities(("shots",), by_shots, trials=asked_items),
            **quantities(("shots", "prompt_seed"), seeds, trials=of_seed_items),
            **quantities(("shots", "readable"), readable, trials=readable_items),
        }

    def sentence(self, summary: xr.Dataset) -> str:
        if "exact" not in summary:
            return "The run is over text: there is no prompt to answer."
        scored = summary.isel(shots=np.flatnonzero(summary["prompts"] > 0))
        if not scored.sizes["shots"]:
            return "No prompt of the run is scored."

        def shown(name: str) -> str:
            parts = []
            for shots in range(scored.sizes["shots"]):
                value, low, high = (
                    100 * float(scored[f"{name}{end}"][shots]) for end in ("", "_low", "_high")
                )
                interval = f" [{low:.1f}, {high:.1f}]" if np.isfinite(low) else ""
                parts.append(f"{int(scored['shots'][shots])}: {value:.1f}{interval}")
            return ", ".join(parts)

        most = scored.isel(shots=-1)
        references = ", ".join(
            f"{what} {100 * float(most[name]):.1f}"
            for name, what in (
                ("most_common", "always their most common answer"),
                ("guess", "length known and type guessed"),
                ("bayes_query", "the best guess from the query's own pairs"),
                ("bayes_answers", "and from all pairs of the prompt"),
            )
            if np.isfinite(most[name])
        )
        number, shots = int(scored["items"].max()), int(most["shots"])
        return (
            f"Prompts answered right, in %, by shots, over {number} item{'s' * (number != 1)}: by generation "
            f"{shown('exact')}; every token the argmax {shown('all_right')}. Without the model, at "
            f"{shots} shot{'s' * (shots != 1)}: {references}."
        )


def _spread(values: np.ndarray) -> np.ndarray:
    """Standard deviation over the last axis, entries without a value left out; NaN of fewer than two."""
    number = np.isfinite(values).sum(-1, keepdims=True)
    mean = np.nansum(values, -1, keepdims=True) / np.maximum(number, 1)
    squares = np.nansum((values - mean) ** 2, -1) / np.maximum(number[..., 0] - 1, 1)
    return np.where(number[..., 0] > 1, np.sqrt(squares), np.nan)


def predictions(output: Output, input_ids: Tensor, rows: Sample) -> tuple[Tensor, Tensor]:
    """The likeliest next token after chosen positions, and the loss of the one that does come: (B, N) each.

    0 where a sample is not valid; the loss after a row's last token means nothing.
    """
    coming = rows.take(input_ids.roll(-1, 1))
    predicted = torch.zeros_like(rows.positions)
    loss = torch.zeros(rows.positions.shape, device=input_ids.device)
    vocabulary = output.logits(output.hidden[:1, :1]).shape[2]
    size = max(1, CHUNK.get(input_ids.device.type, CHUNK["cuda"]) // vocabulary)
    for places in rows.valid.nonzero().split(size):
        row, sample = places.unbind(1)
        logits = output.logits(output.hidden[row, rows.positions[row, sample]][None])[0]
        predicted[row, sample] = logits.argmax(1)
        log_p = log_softmax(logits, dim=1, dtype=torch.float32)  # (n, vocabulary)
        loss[row, sample] = -log_p.gather(1, coming[row, sample][:, None])[:, 0]
    return predicted, loss


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What one prompt's greedy generation is held against, and where it ends."""

    prompt: Sequence[int]
    answer: str  # the gold answer's text, stripped
    most_tokens: int
    vocabulary: Sequence[str]
    stop: str
    end_tokens: Collection[int | None]

    def verdict(self, said: Sequence[int]) -> bool | None:
        """Whether these first tokens make the answer; None while tokens to come decide."""
        ends = said[-1] in self.end_tokens
        words = said[:-1] if ends else said
        # A model may have more ids than its tokenizer: none of them writes a bracket.
        known = len(self.vocabulary)
        text = "".join(self.vocabulary[i] if i < known else "\ufffd" for i in words)
        text, stop, _ = text.partition(self.stop)
        right = text.strip() == self.answer
        if stop or ends or len(said) >= self.most_tokens:
            return right
        return None if right or self.answer.startswith(text.lstrip()) else False


def generates_answer(
    model: PreTrainedModel, batch: Batch, predicted: Tensor, right: Tensor
) -> Tensor:
    """Whether greedy generation gives the answer's text: (B,), bool.

    `predicted` (B, A + 1) holds the argmax under teacher forcing for each token of the answer, and last for what follows it;
    `right` (B, A) where it is the answer's. As far as they agree, this is what the model generates. Then a row goes on
    only while its text can still become the answer: white space after it, or another tokenization.
    """
    assert batch.prompts is not None
    numbers, agreed = batch.prompts.answer.valid.sum(1), right.cumprod(1).sum(1)
    place = agreed.masked_fill(agreed == numbers, right.shape[1])
    token = predicted.gather(1, place[:, None])[:, 0].tolist()
    generations, said = [], []
    for row, (ids, length, number, same) in enumerate(
        zip(
            batch.input_ids.tolist(),
            batch.lengths.tolist(),
            numbers.tolist(),
            agreed.tolist(),
            strict=True,
        )
    ):
        gold = ids[length - number : length]
        generations.append(_generation(model, batch.prompts, ids[: length - number], gold))
        said.append([*gold[:same], token[row]])
    verdicts = [g.verdict(tokens) for g, tokens in zip(generations, said, strict=True)]
    while undecided := [row for row, verdict in enumerate(verdicts) if verdict is None]:
        following = next_tokens(model, [[*generations[r].prompt, *said[r]] for r in undecided])
        for row, token_id in zip(undecided, following, strict=True):
            said[row].append(token_id)
            verdicts[row] = generations[row].verdict(said[row])
    return torch.tensor([bool(verdict) for verdict in verdicts])


def _generation(
    model: PreTrainedModel, prompts: PromptBatch, prompt: Sequence[int], gold: Sequence[int]
) -> Generation:
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    room = np.inf if context is None else context - len(prompt) + 1
    ends = getattr(model.generation_config, "eos_token_id", None)
    return Generation(
        prompt=prompt,
        answer="".join(prompts.vocabulary[i] for i in gold).strip(),
        most_tokens=int(min(len(gold) + MORE_TOKENS, room)),
        vocabulary=prompts.vocabulary,
        stop=prompts.stop,
        end_tokens=ends if isinstance(ends, list) else [ends],
    )


def next_tokens(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> list[int]:
    """The argmax after each of some sequences, in one forward over all of them, padded on the right."""
    device = next(model.parameters()).device
    length = max(map(len, sequences))
    ids = torch.tensor([[*ids, *[0] * (length - len(ids))] for ids in sequences], device=device)
    last = torch.tensor([[len(ids) - 1] for ids in sequences], device=device)
    decoded = activations.decode(model, ids)
    hidden = Sample(positions=last, valid=torch.ones_like(last, dtype=torch.bool)).take(
        decoded.last_hidden_state
    )
    return activations.head_of(model, decoded)(hidden).argmax(-1)[:, 0].tolist()
