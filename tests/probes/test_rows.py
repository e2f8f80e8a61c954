"""Rows of sampled queries against the models' own eager attention, seen by a wrapper of our own."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from smeltscope.activations import Attention, capture
from smeltscope.errors import SmeltscopeError
from smeltscope.model import Execution, tiny
from smeltscope.probes.rows import check_rows, products, rows_of, softmax_with_sink
from smeltscope.probes.sampling import Sample, sample_queries

LENGTHS = [150, 80, 64, 17, 2, 1]
MODELS = {
    "smelt": {},
    "smelt, 3 visits": {"num_visits": 3},
    "llama": {},
    "llama, one head": {"num_attention_heads": 1, "num_key_value_heads": 1},
    "gpt2": {},
    "gpt_oss": {},  # sliding windows in every other layer, a learned sink in each head
    "inkling2_loop": {},  # windows, position bias, a learned sink for each token
    "dory": {},
    "hrm_text": {},
}


def some_tokens(length: int, rows: int) -> torch.Tensor:
    return torch.randint(1, 256, (rows, length), generator=torch.Generator().manual_seed(0))


def sample(lengths: list[int], size: int = 12) -> Sample:
    positions, valid = sample_queries(
        np.array(lengths), [[0, i] for i in range(len(lengths))], size
    )
    return Sample(positions=torch.from_numpy(positions), valid=torch.from_numpy(valid))


def attentions_of(model: torch.nn.Module, ids: torch.Tensor) -> list[Attention]:
    with torch.no_grad(), capture(model) as run:
        model(ids)
    return [run[e.index, "attention"] for e in run.executions]


@pytest.mark.parametrize("variant", MODELS)
def test_like_eager_attention(run_eagerly, variant):
    model = tiny(variant.split(",")[0], **MODELS[variant])
    ids, queries = some_tokens(max(LENGTHS), len(LENGTHS)), sample(LENGTHS)
    expected: list[np.ndarray] = []  # (B, H, T, T) of every execution
    run_eagerly(model, ids, lambda weights, *_, **__: expected.append(weights.double().numpy()))
    attentions = attentions_of(model, ids)
    assert len(expected) == len(attentions)
    hidden_somewhere = False
    for attention, eager in zip(attentions, expected, strict=True):
        blocks = rows_of(attention, queries)
        assert torch.equal(torch.cat([b.queries.positions for b in blocks], 1), queries.positions)
        assert torch.equal(torch.cat([b.queries.valid for b in blocks], 1), queries.valid)
        for block in blocks:
            keys = block.mass.shape[3]
            for b, row in enumerate(block.queries.positions.tolist()):
                for n, q in enumerate(row):
                    true = eager[b, :, q]  # (H, T)
                    np.testing.assert_allclose(block.mass[b, :, n], true[:, :keys], atol=2e-6)
                    assert (true[:, keys:] == 0).all()
                    seen = true[0] > 0
                    assert block.keys_seen[b, n] == seen.sum()
                    assert block.sees_first[b, n] == seen[0]
                    scores = block.scores[b, :, n].numpy()
                    assert (np.isneginf(scores) == ~seen[:keys]).all()
                    hidden_somewhere |= not seen[0]
    assert hidden_somewhere == (variant in ("gpt_oss", "inkling2_loop", "dory"))


@pytest.mark.parametrize("variant", ["gpt_oss", "inkling2_loop"])
def test_learned_sinks_take_their_share(variant):
    attentions = attentions_of(tiny(variant), some_tokens(90, 2))
    queries = sample([90, 90])
    for attention in attentions:
        for block in rows_of(attention, queries):
            for b in range(2):
                learned = attention.learned_sink[b][:, block.queries.positions[b]]
                torch.testing.assert_close(block.mass[b].sum(-1), 1 - learned, atol=1e-6, rtol=0)
                alone = softmax_with_sink(block.scores, block.sink_logit)[b]
                torch.testing.assert_close(alone, block.mass[b])


def test_scores_are_products_and_keep_their_order_where_masses_underflow():
    attention = attentions_of(tiny("llama"), some_tokens(40, 1))[0]
    attention = replace(attention, query=attention.query * 1e4)
    positions = torch.tensor([[30, 39]])
    queries = Sample(positions=positions, valid=torch.ones_like(positions, dtype=torch.bool))
    (block,) = rows_of(attention, queries)
    assert (block.mass[0, :, 1] == 0).sum() > 20
    for h in range(4):
        score = attention.query[0, h, 39].double() @ attention.key[0, h // 2].double().T
        assert torch.equal(block.scores[0, h, 1].argsort(), score.argsort())
    query = block.query / 1e4
    key = torch.randn(1, 2, 50, 8, generator=torch.Generator().manual_seed(0))
    expected = torch.einsum("bhnd,bhkd->bhnk", query, key.repeat_interleave(2, 1)[:, :, :33])
    torch.testing.assert_close(products(query, key, 33), expected)


def test_blocks_hold_not_much_more_than_the_rows():
    lengths = [400, 300]
    attention = attentions_of(tiny("llama"), some_tokens(400, 2))[0]
    queries = sample(lengths, 64)
    blocks = rows_of(attention, queries)
    needed = torch.cat([b.queries.positions.amax(0) + 1 for b in blocks])
    assert sum(b.mass[0, 0].numel() for b in blocks) <= 2 * needed.clamp(min=64).sum()
    assert len(blocks) == 4  # up to 64, 128, 256 and 400 keys
    for block in blocks:
        assert block.mass.shape[3] == block.queries.positions.max() + 1


def test_one_token_has_one_row():
    queries = sample([1])
    (block,) = rows_of(attentions_of(tiny("llama"), some_tokens(1, 1))[0], queries)
    assert block.mass.shape == (1, 4, 1, 1) and (block.mass == 1).all()
    assert not block.queries.valid.any()


def test_bfloat16_is_reduced_in_float32():
    attention = attentions_of(tiny("smelt").to(torch.bfloat16), some_tokens(90, 2))[3]
    assert attention.query.dtype == torch.bfloat16
    for block in rows_of(attention, sample([90, 90])):
        assert block.mass.dtype == torch.float32
        for b, row in enumerate(block.queries.positions.tolist()):
            for n, q in enumerate(row):
                for h in range(4):
                    score = (
                        attention.key[b, h // 2, : q + 1].double()
                        @ attention.query[b, h, q].double()
                    )
                    true = (score * attention.scale).softmax(0)
                    found = block.mass[b, h, n, : q + 1].double()
                    torch.testing.assert_close(found, true, atol=1e-6, rtol=0)


def test_overflowing_scores_are_refused():
    attention = attentions_of(tiny("llama"), some_tokens(20, 1))[1]
    rows = rows_of(replace(attention, query=attention.query * torch.inf), sample([20]))
    execution = Execution(index=1, layer=1, visit=1)
    with pytest.raises(SmeltscopeError, match="layer 1 at visit 1 is not a number"):
        check_rows(rows, execution)
    check_rows(rows_of(attention, sample([20])), execution)
