"""Models in memory as checkpoints, and digests that say which they are."""

from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from smeltscope.errors import SmeltscopeError
from smeltscope.model import TINY_MODELS, SmeltForCausalLM, checkpoint_of, tiny
from smeltscope.model.checkpoint import context_of, digest_of_model


@pytest.mark.parametrize("kind", TINY_MODELS)
def test_a_model_in_memory(kind: str) -> None:
    model, tokenizer = tiny(kind), object()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    checkpoint = checkpoint_of(model, tokenizer, name="mine")
    assert checkpoint.model is model and checkpoint.tokenizer is tokenizer
    assert (checkpoint.name, checkpoint.folder) == ("mine", None)
    assert checkpoint.context == 512
    assert checkpoint_of(tiny(kind)).digest == checkpoint.digest == digest_of_model(model)
    assert checkpoint_of(tiny(kind, seed=1)).digest != checkpoint.digest
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_a_digest_is_of_the_model(tmp_path: Path) -> None:
    digest = digest_of_model(tiny())
    # Not of where it was saved or how it runs.
    tiny().save_pretrained(tmp_path)
    model = SmeltForCausalLM.from_pretrained(tmp_path)
    model.set_attn_implementation("eager")
    assert digest_of_model(model) == digest
    others = [tiny(residual_scale=1.0), tiny(num_visits=3), tiny().to(torch.bfloat16), tiny()]
    with torch.no_grad():
        others[-1].model.layers[4].mlp.experts.down_proj[7, 31, 15] += 1e-6  # visit 2's, tied
    assert len({digest, *map(digest_of_model, others)}) == 5


def test_a_context_that_is_not_told() -> None:
    assert context_of(transformers.GPT2Config(n_positions=77)) == 77
    assert context_of(transformers.BloomConfig()) == 4096


def test_what_cannot_be_probed_is_refused() -> None:
    with pytest.raises(SmeltscopeError, match="A DataParallel is no model of transformers"):
        checkpoint_of(nn.DataParallel(tiny()))  # type: ignore[arg-type]
    with pytest.raises(SmeltscopeError, match=r"model mine is in training mode.*eval"):
        checkpoint_of(tiny().train(), name="mine")
    bert = transformers.BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(SmeltscopeError, match="is a BertForMaskedLM, in which tokens see later"):
        checkpoint_of(transformers.BertForMaskedLM(bert).eval())
    model = tiny()
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    with pytest.raises(SmeltscopeError, match=r"NaN or infinite weights .* model\.norm\.weight"):
        checkpoint_of(model)
    with torch.device("meta"):
        empty = SmeltForCausalLM(tiny().config).eval()
    with pytest.raises(SmeltscopeError, match="not in memory"):
        checkpoint_of(empty)
