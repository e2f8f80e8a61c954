"""What TransformerLens keeps of the same weights, reduced by plain numpy in float64, against the probes' numbers.

residual-updates and qkv-similarity are compared with TransformerLens in their own tests.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformer_lens.model_bridge import TransformerBridge

from smeltscope.activations import open_run
from smeltscope.model import load_checkpoint
from smeltscope.probes import AttentionSink, RunOptions, run_probes
from smeltscope.probes.attended_tokens import AttendedTokens
from smeltscope.probes.loss import Loss
from smeltscope.probes.router_overlap import RouterOverlap
from smeltscope.probes.sampling import sample_queries, segment_seed
from smeltscope.probes.swap import Swap

PROBES = [AttentionSink(), AttendedTokens(), Swap(), RouterOverlap(), Loss()]
LENGTHS = (160, 120)
SAMPLED = 60  # of 159 and of 119 queries
PER_ITEM = 1e-5  # of a sum, for each query or token in it
TIE = 1e-5  # scores closer than this may change places with rounding
HEADS, EXPERTS, CHOSEN = 4, 8, 2
PAIRS = {1: (1, 4), 2: (2, 5), 3: (3, 6)}  # looped layer: the executions of its two visits
DELIMITERS = "!\"#%&'()*,-./:;?@[\\]_{}\n\r"  # of those that are a single byte


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One segment as TransformerLens has it, in float64; `blocks` by execution, then by hook."""

    ids: np.ndarray  # (T,)
    queries: np.ndarray  # (S,), the sampled ones
    logits: np.ndarray  # (T, vocabulary)
    blocks: list[Mapping[str, np.ndarray]]

    @property
    def length(self) -> int:
        return len(self.ids)


# name: the hook of a block, and how its axes are put in the order (head, T, ...) that is used here
HOOKS = {
    "scores": ("attn.hook_attn_scores", (0, 1, 2)),
    "pattern": ("attn.hook_pattern", (0, 1, 2)),
    "q": ("attn.hook_rot_q", (1, 0, 2)),
    "k": ("attn.hook_rot_k", (1, 0, 2)),
    "v": ("attn.hook_v", (1, 0, 2)),
    "z": ("attn.hook_z", (1, 0, 2)),
    "resid": ("hook_resid_pre", (0, 1)),
}
ROUTER_HOOKS = {
    "router_logits": "mlp.gate.hook_out",
    "weights": "mlp.hook_expert_weights",
    "experts": "mlp.hook_expert_indices",
}


def seen_by(bridge: Any, ids: np.ndarray, queries: np.ndarray) -> Seen:
    with torch.no_grad():
        logits, cache = bridge.run_with_cache(torch.from_numpy(ids.astype(np.int64))[None])
    blocks = []
    for n in range(len(bridge.blocks)):
        of = {
            name: cache[f"blocks.{n}.{hook}"][0].double().numpy().transpose(axes)
            for name, (hook, axes) in HOOKS.items()
        }
        of |= {name: cache[f"blocks.{n}.{h}"].double().numpy() for name, h in ROUTER_HOOKS.items()}
        blocks.append(of)
    return Seen(ids=ids, queries=queries, logits=logits[0].double().numpy(), blocks=blocks)


@pytest.fixture(scope="module")
def both(tiny_checkpoint, make_heldout, tmp_path_factory):
    """The rows of a run, and what TransformerLens saw of each row's segment."""
    checkpoint, heldout = load_checkpoint(tiny_checkpoint), make_heldout(LENGTHS)
    options = RunOptions(max_length=max(LENGTHS), batch_tokens=1200, sampled_queries=SAMPLED)
    out = tmp_path_factory.mktemp("runs") / "run.h5"
    run = open_run(run_probes(checkpoint, heldout, PROBES, out, options))
    bridge = TransformerBridge.boot_transformers(str(tiny_checkpoint), device="cpu")
    seen = []
    for length in run["segments"]["tokens"].values:
        row = LENGTHS.index(length)
        ids = heldout.segment(row)
        document = heldout.documents[heldout.document[row]].id
        seeds = [segment_seed(document, ids, options.seed)]
        queries, valid = sample_queries(np.array([length]), seeds, SAMPLED)
        assert valid.all()
        seen.append(seen_by(bridge, ids, queries[0]))
    text = [checkpoint.tokenizer.decode([i]) for i in range(len(checkpoint.tokenizer))]
    delimiter = np.array([t in DELIMITERS for t in text])
    assert delimiter.sum() == len(DELIMITERS)
    return SimpleNamespace(run=run, seen=seen, delimiter=delimiter)


def rows(both: Any, group: str) -> Any:
    """Each segment, and the run's numbers of it."""
    arrays = both.run[group].data_vars.items()
    for row, seen in enumerate(both.seen):
        yield seen, {name: a.values[row] for name, a in arrays if "segment" in a.dims}


def assert_near(found: Any, expected: Any, items: float, name: str = "") -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=PER_ITEM * items, err_msg=name)


def test_the_sample_is_a_sample(both: Any) -> None:
    for seen in both.seen:
        assert len(seen.queries) == SAMPLED < seen.length - 1
        assert (np.diff(seen.queries) > 0).all() and seen.queries[0] > 0


# ---------------------------------------------------------------- attention-sink


def region(q: int, k: int, is_delimiter: bool) -> int:
    if k == 0:
        return 0
    if q - k < 2:
        return 1 + q - k
    return 3 if q - k < 8 else 4 if is_delimiter else 5


def test_sink_mass_over_all_queries(both: Any) -> None:
    edges = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    for seen, found in rows(both, "attention_sink"):
        for e, of in enumerate(seen.blocks):
            pattern, counted = of["pattern"], seen.length - 1
            assert found["queries"][e] == counted
            assert_near(found["sink_mass_sum"][e], pattern[:, 1:, 0].sum(1), counted)
            for k in range(1, 5):
                nearby = found["nearby_mass_sum"][e, :, k - 1]
                assert_near(nearby, pattern[:, 1:, k].sum(1), counted)
            for i, (start, stop) in enumerate(pairwise(edges)):
                mass = found["sink_mass_by_position_sum"][e, :, i + 1]
                assert_near(mass, pattern[:, start:stop, 0].sum(1), stop - start)
            assert_near(found["sink_alpha"][e], pattern[:, :64, 0].mean(1), 1)
            sixteen = 1 + np.round(np.arange(16) * (counted - 1) / 15).astype(int)
            heaviest = pattern[:, sixteen].sum(1).argmax(1)
            on_it = pattern[np.arange(HEADS), 1:, heaviest].sum(1)
            on_it = np.maximum(on_it, pattern[:, 1:, 0].sum(1))
            assert_near(found["heaviest_mass_sum"][e], on_it, counted)
            uniform = (1 / np.arange(2, seen.length + 1)).sum()
            assert_near(found["uniform_sum"][e], uniform, counted)


def test_rows_of_sampled_queries(both: Any) -> None:
    """Regions, entropy and what the first token adds to the heads' outputs."""
    for seen, found in rows(both, "attention_sink"):
        is_delimiter = both.delimiter[seen.ids]
        assert is_delimiter.any()
        for e, of in enumerate(seen.blocks):
            mass, uniform = np.zeros((HEADS, 6)), np.zeros(6)
            entropy, relative, share = np.zeros((3, HEADS))
            value = np.linalg.norm(of["v"][:, 0], axis=1).repeat(HEADS // len(of["v"]))
            for q in seen.queries:
                p = of["pattern"][:, q, : q + 1]
                for k in range(q + 1):
                    mass[:, region(q, k, is_delimiter[k])] += p[:, k]
                    uniform[region(q, k, is_delimiter[k])] += 1 / (q + 1)
                nats = -(p * np.log(p)).sum(1)
                entropy, relative = entropy + nats, relative + nats / np.log(q + 1)
                share += p[:, 0] * value / np.linalg.norm(of["z"][:, q], axis=1)
            assert found["sampled_queries"][e] == SAMPLED
            assert (found["first_share_queries"][e] == SAMPLED).all()
            expected = {
                "region_mass_sum": mass,
                "region_uniform_sum": uniform,
                "entropy_sum": entropy,
                "relative_entropy_sum": relative,
                "first_share_sum": share,
            }
            for name, value_of in expected.items():
                assert_near(found[name][e], value_of, SAMPLED, name)


def test_norms_of_the_first_token_and_the_others(both: Any) -> None:
    for seen, found in rows(both, "attention_sink"):
        for e, of in enumerate(seen.blocks):
            for name, hook in (("residual", "resid"), ("key", "k"), ("value", "v")):
                norm = np.linalg.norm(of[hook], axis=-1)  # (T,) or (kv_head, T)
                assert_near(found[f"first_{name}_norm"][e], norm[..., 0], 1, name)
                assert_near(found[f"{name}_norm_sum"][e], norm[..., 1:].sum(-1), seen.length, name)


# ---------------------------------------------------------------- attended-tokens


def same_keys(a: Mapping, b: Mapping, h: int, g: int, queries: np.ndarray) -> dict[str, Any]:
    """Head h of one block beside head g of another: sums over queries, (first_key,) each."""
    sums = {name: np.zeros(2) for name in ("top1", "top1 of many", "top8", "overlap", "near ties")}
    for q in queries:
        for first in (0, 1):
            visible = slice(first, q + 1)
            if q + 1 - first < 2:
                continue
            (p, s), (r, t) = (
                (block["pattern"][head, q, visible], block["scores"][head, q, visible])
                for block, head in ((a, h), (b, g))
            )
            best, other = np.argsort(-s), np.argsort(-t)
            sums["top1"][first] += best[0] == other[0]
            sums["overlap"][first] += np.minimum(p / p.sum(), r / r.sum()).sum()
            sums["near ties"][first] += any(tied(x, 1) for x in (s, t))
            if q + 1 >= 64:
                sums["top1 of many"][first] += best[0] == other[0]
                sums["top8"][first] += len({*best[:8]} & {*other[:8]}) / 8
                sums["near ties"][first] += any(tied(x, 8) for x in (s, t))
    return sums


def tied(scores: np.ndarray, place: int) -> bool:
    """Whether the scores at this place and the next are too close for rounding."""
    ordered = -np.sort(-scores)
    return bool(ordered[place - 1] - ordered[place] < TIE)


def assert_same_keys(found: Mapping, place: tuple, h: int, expected: Mapping, prefix: str) -> None:
    for first in (0, 1):
        ties = expected["near ties"][first]  # each may be decided either way
        for name, value, cut in (
            ("top1_sum", "top1", (0, first)),
            ("top1_sum", "top1 of many", (1, first)),
            ("top8_sum", "top8", (first,)),
        ):
            ours = found[prefix + name][(*place, h, *cut)]
            bound = PER_ITEM * SAMPLED + ties
            np.testing.assert_allclose(ours, expected[value][first], rtol=0, atol=bound)
        overlap = found[f"{prefix}overlap_sum"][(*place, h, 0, first)]
        assert_near(overlap, expected["overlap"][first], SAMPLED, f"{prefix}overlap")


def test_keys_that_two_visits_attend_to(both: Any) -> None:
    ties = 0.0
    for seen, found in rows(both, "attended_tokens"):
        many = seen.queries[seen.queries >= 63]
        assert len(many) > 5
        for i, (one, two) in enumerate(PAIRS.values()):
            assert found["queries"][i, 0, 0, 0] == SAMPLED
            assert (found["queries"][i, 0, 1] == len(many)).all()
            assert_near(found["chance_sum"][i, 0, 1, 0], (1 / (many + 1)).sum(), SAMPLED)
            for h in range(HEADS):
                expected = same_keys(seen.blocks[one], seen.blocks[two], h, h, seen.queries)
                assert_same_keys(found, (i, 0), h, expected, "")
                ties += expected["near ties"].sum()
    assert ties < 10  # of some thousand


def test_keys_that_two_heads_attend_to(both: Any) -> None:
    for seen, found in rows(both, "attended_tokens"):
        for e, of in enumerate(seen.blocks):
            for h in range(HEADS):
                expected = same_keys(of, of, h, (h + HEADS // 2) % HEADS, seen.queries)
                assert_same_keys(found, (e,), h, expected, "control_")


# ---------------------------------------------------------------- swap


def test_queries_and_keys_of_two_visits(both: Any) -> None:
    """Masses under both visits' own queries and keys from the patterns, the exchanged ones from rotated vectors."""
    for seen, found in rows(both, "swap"):
        is_delimiter = both.delimiter[seen.ids]
        for i, visits in enumerate(PAIRS.values()):
            a, b = (seen.blocks[e] for e in visits)
            for h in range(HEADS):
                group = h // (HEADS // len(a["k"]))
                mass = np.zeros((6, 4))
                dots, squares, change_square, read_square = np.zeros(3), np.zeros(3), 0.0, 0.0
                before, after = a["v"][group], b["v"][group]
                for q in seen.queries:
                    p, r = (x["pattern"][h, q, : q + 1] for x in (a, b))
                    exchanged = [
                        softmax(y["k"][group, : q + 1] @ x["q"][h, q] / np.sqrt(len(x["q"][h, q])))
                        for x, y in ((b, a), (a, b))
                    ]
                    for s, masses in enumerate((p, *exchanged, r)):
                        for k in range(q + 1):
                            mass[region(q, k, is_delimiter[k]), s] += masses[k]
                    v, w = before[: q + 1], after[: q + 1]
                    terms = np.array([(r - p) @ v, p @ (w - v), (r - p) @ (w - v)])
                    change = b["z"][h, q] - a["z"][h, q]
                    dots, squares = dots + terms @ change, squares + (terms**2).sum(1)
                    change_square += change @ change
                    read_square += a["z"][h, q] @ a["z"][h, q]
                for name, value in {
                    "mass_sum": mass,
                    "term_dot_sum": dots,
                    "term_square_sum": squares,
                    "change_square_sum": change_square,
                    "read_square_sum": read_square,
                }.items():
                    assert_near(found[name][i, 0, h], value, SAMPLED, name)
                assert found["queries"][i, 0] == SAMPLED


def softmax(scores: np.ndarray) -> np.ndarray:
    exp = np.exp(scores - scores.max())
    return exp / exp.sum()


# ---------------------------------------------------------------- router-overlap


def test_experts_of_two_visits(both: Any) -> None:
    load = np.zeros((9, EXPERTS))
    for seen, found in rows(both, "router_overlap"):
        counted = range(1, seen.length)
        sets = [[set(chosen) for chosen in of["experts"].tolist()] for of in seen.blocks]
        for e, of in enumerate(seen.blocks):
            # TransformerLens' own hooks agree with each other: the experts are the top 2 logits.
            top = np.argsort(-of["router_logits"], axis=1)[:, :CHOSEN]
            assert [set(chosen) for chosen in top.tolist()] == sets[e]
            for t in counted:
                load[e, list(map(int, sets[e][t]))] += 1
            p = np.apply_along_axis(softmax, 1, of["router_logits"])[1:]
            assert_near(found["entropy_sum"][e], -(p * np.log(p)).sum(), seen.length)
            assert found["tokens"][e] == seen.length - 1
            assert found["not_top_logits"][e] == 0
        for i, (one, two) in enumerate(PAIRS.values()):
            shared = [sets[one][t] & sets[two][t] for t in counted]
            count = [sum(len(s) == n for s in shared) for n in range(CHOSEN + 1)]
            assert found["overlap_count"][i, 0].tolist() == count
            for name, e in (("earlier", one), ("later", two)):
                weights = seen.blocks[e]["weights"]
                share = sum(
                    weights[t, list(map(int, s))].sum() / weights[t].sum()
                    for t, s in zip(counted, shared, strict=True)
                )
                assert_near(found[f"shared_weight_{name}_sum"][i, 0], share, seen.length)
            other = [
                len(sets[one][t] & sets[two][1 + (t - 1 + len(shared) // 2) % len(shared)])
                for t in counted
            ]
            assert found["other_token_sum"][i, 0] == sum(other)
    counts = both.run["router_overlap"]["load"].sum(("table_category", "fold"))
    assert np.array_equal(counts.values, load)


# ---------------------------------------------------------------- loss


def test_loss_from_the_logits(both: Any) -> None:
    edges = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256]
    for seen, found in rows(both, "loss"):
        p = np.apply_along_axis(softmax, 1, seen.logits)
        loss = -np.log(p[np.arange(seen.length - 1), seen.ids[1:]])
        assert found["tokens"] == len(loss)
        assert_near(found["loss_sum"], loss.sum(), len(loss))
        assert_near(found["uniform_sum"], len(loss) * np.log(p.shape[1]), len(loss))
        for i, (start, stop) in enumerate(pairwise(edges)):
            part = loss[start:stop]
            assert found["tokens_by_position"][i] == len(part)
            assert_near(found["loss_by_position_sum"][i], part.sum(), stop - start)
