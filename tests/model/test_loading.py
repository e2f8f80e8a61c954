"""Loading: any decoder-only checkpoint, as it was saved, and a digest that says which it was."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from smeltscope import SmeltscopeError
from smeltscope.model import (
    TINY_MODELS,
    SmeltForCausalLM,
    checkpoint_of,
    load_checkpoint,
    shipped_checkpoints,
    with_visits,
)
from smeltscope.model import tiny as tiny_model
from smeltscope.model.checkpoint import digest_of
from smeltscope.model.loading import choose_device, find_checkpoint, load_model

Save = Callable[..., Path]


@pytest.fixture
def copied(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_checkpoint, tmp_path / "copy")


def test_what_a_checkpoint_says_of_itself(tiny_checkpoint: Path) -> None:
    checkpoint = load_checkpoint(tiny_checkpoint)
    assert checkpoint.name == str(tiny_checkpoint) and checkpoint.folder == tiny_checkpoint
    assert checkpoint.digest == digest_of(tiny_checkpoint)
    assert checkpoint.context == 512
    assert checkpoint.tokenizer.bos_token == "<s>"
    assert isinstance(checkpoint.model, SmeltForCausalLM) and not checkpoint.model.training
    expected = dict(tiny_model("smelt", vocab_size=258).named_parameters())
    for name, parameter in checkpoint.model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_a_digest_is_of_the_contents(tiny_checkpoint: Path, copied: Path) -> None:
    from safetensors.torch import load_file, save_file

    digest = digest_of(tiny_checkpoint)
    os.utime(copied / "model.safetensors", (0, 0))
    (copied / "README.md").write_text("what has no influence on a number")
    assert digest_of(copied) == digest
    weights = load_file(copied / "model.safetensors")
    weights["model.norm.weight"][3] += 1e-6
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    other_weight = digest_of(copied)
    config = (copied / "config.json").read_text()
    (copied / "config.json").write_text(
        config.replace('"residual_scale": 0.5', '"residual_scale": 1.0')
    )
    assert len({digest, other_weight, digest_of(copied)}) == 3


def test_number_types(tmp_path: Path) -> None:
    tiny_model().to(torch.bfloat16).save_pretrained(tmp_path)

    def dtype_of(**options: str) -> torch.dtype:
        return next(load_model(tmp_path, **options).parameters()).dtype

    assert dtype_of() == torch.float32  # auto, on the CPU
    assert dtype_of(dtype="bfloat16") == torch.bfloat16
    assert load_checkpoint(tmp_path, device="cpu", dtype="float32").model.dtype == torch.float32


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_auto_is_what_was_saved(tmp_path: Path) -> None:
    tiny_model().to(torch.bfloat16).save_pretrained(tmp_path)
    model = load_checkpoint(tmp_path).model
    assert model.dtype == torch.bfloat16 and model.device.type == "cuda"


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == "cpu" == choose_device("cpu")
    with pytest.raises(SmeltscopeError, match="no CUDA device"):
        choose_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == "cuda"
    assert choose_device("cuda:1") == "cuda:1"
    for wrong in ("cuda:2", "cuda:-1", "gpu", "cpu:1", "", "CUDA"):
        with pytest.raises(SmeltscopeError, match="--device"):
            choose_device(wrong)


def test_without_a_tokenizer(tmp_path: Path, save_checkpoint: Save) -> None:
    assert load_checkpoint(save_checkpoint(tmp_path, with_tokenizer=False)).tokenizer is None


@pytest.mark.parametrize("kind", [k for k in TINY_MODELS if k != "smelt"])
def test_every_architecture_comes_back_as_it_was(
    kind: str, tmp_path: Path, save_checkpoint: Save
) -> None:
    folder = save_checkpoint(tmp_path, kind, with_tokenizer=False)
    model = load_model(folder)
    expected = tiny_model(kind, **({} if kind == "inkling2_loop" else {"vocab_size": 258}))
    ids = torch.arange(1, 9)[None]
    with torch.inference_mode():
        difference = model(ids).logits - expected(ids).logits
    assert difference.abs().max() < 1e-5


def test_sharded_weights(tiny_checkpoint: Path, tmp_path: Path) -> None:
    model = load_model(tiny_checkpoint)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    whole, sharded = model.state_dict(), load_model(tmp_path).state_dict()
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


def test_another_number_of_visits(
    tiny_checkpoint: Path, tmp_path: Path, save_checkpoint: Save
) -> None:
    def load(**options: Any) -> SmeltForCausalLM:
        checkpoint = load_checkpoint(tiny_checkpoint, **options)
        assert checkpoint.digest == digest_of(tiny_checkpoint)  # of what is stored
        assert isinstance(checkpoint.model, SmeltForCausalLM)
        return checkpoint.model

    model = load(visits=3)
    assert model.config.num_visits == 3 and len(model.model.layers) == 12
    assert model.config.residual_scale == 0.5  # as trained
    assert len(load(visits=0).model.layers) == 3
    other = load(residual_scale=0.25).config
    assert (other.num_visits, other.residual_scale) == (2, 0.25)
    other = load(visits=4, residual_scale=0.25).config
    assert (other.num_visits, other.residual_scale) == (4, 0.25)
    with pytest.raises(SmeltscopeError, match="num_visits is -1; give 1 or more, or 0"):
        load(visits=-1)
    llama = save_checkpoint(tmp_path / "llama", "llama")
    for options in ({"visits": 2}, {"residual_scale": 1.0}):
        with pytest.raises(SmeltscopeError, match=r"--visits and --residual-scale .* is a Llama"):
            load_checkpoint(llama, **options)


@pytest.mark.parametrize("kind", TINY_MODELS)
def test_untrained(kind: str, tmp_path: Path, save_checkpoint: Save) -> None:
    """The configuration as it is, the weights as transformers draws them with seed 0."""
    folder = save_checkpoint(tmp_path, kind)
    trained = load_checkpoint(folder)
    (folder / "model.safetensors").unlink()  # nothing of it is read
    checkpoint = load_checkpoint(folder, untrained=True)
    assert checkpoint.name == f"{folder} (untrained)" and checkpoint.tokenizer is not None
    assert not checkpoint.model.training and checkpoint.model.dtype == torch.float32
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    expected = AutoModelForCausalLM.from_config(config).state_dict()
    for name, weight in checkpoint.model.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    torch.manual_seed(1)
    state = torch.get_rng_state()
    again = load_checkpoint(folder, untrained=True, dtype="bfloat16")
    assert torch.equal(torch.get_rng_state(), state)
    assert again.digest == checkpoint.digest != trained.digest
    assert again.model.dtype == torch.bfloat16
    weights = zip(again.model.parameters(), checkpoint.model.parameters(), strict=True)
    assert all(torch.equal(a, b.to(torch.bfloat16)) for a, b in weights)


def test_untrained_with_other_visits(tiny_checkpoint: Path) -> None:
    plain = load_checkpoint(tiny_checkpoint, untrained=True)
    looped = load_checkpoint(tiny_checkpoint, untrained=True, visits=3, residual_scale=1.0)
    assert looped.model.config.num_visits == 3 and looped.digest == plain.digest
    assert torch.equal(
        looped.model.model.layers[8].self_attn.q_proj.weight,
        plain.model.model.layers[2].self_attn.q_proj.weight,
    )


def test_one_place_for_a_model(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SmeltscopeError, match=r"give one of them"):
        load_checkpoint(tiny_checkpoint, device="cpu", device_map="auto")
    with pytest.raises(SmeltscopeError, match=r"give one of them"):
        load_checkpoint(tiny_checkpoint, tensor_parallel=True, device_map="auto")
    with pytest.raises(SmeltscopeError, match=r"start them with torchrun"):
        load_checkpoint(tiny_checkpoint, tensor_parallel=True)
    for changes in ({"visits": 3}, {"residual_scale": 1.0}, {"untrained": True}):
        with pytest.raises(SmeltscopeError, match=r"need the whole model on one device"):
            load_checkpoint(tiny_checkpoint, device_map="auto", **changes)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert load_checkpoint(tiny_checkpoint, tensor_parallel=True).model.config.num_visits == 2
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SmeltscopeError, match=r"2 key/value heads, which 4 processes cannot share"):
        load_checkpoint(tiny_checkpoint, tensor_parallel=True)


def test_biases_are_not_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model(attention_bias=True).save_pretrained(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SmeltscopeError, match=r"attention_bias cannot be split"):
        load_checkpoint(tmp_path, tensor_parallel=True)


@pytest.mark.parametrize("kind", ["smelt", "llama", "hrm_text"])
def test_a_device_map(kind: str, tmp_path: Path, save_checkpoint: Save) -> None:
    folder = save_checkpoint(tmp_path, kind)
    spread, whole = load_checkpoint(folder, device_map="auto"), load_checkpoint(folder)
    assert spread.digest == whole.digest and not spread.model.training
    ids = torch.arange(1, 9)[None].to(spread.model.device)
    with torch.no_grad():
        difference = spread.model(ids).logits.cpu() - whole.model(ids).logits.cpu()
    assert difference.abs().max() < 1e-5
    with pytest.raises(SmeltscopeError, match=r"could not be loaded: .*device_map"):
        load_checkpoint(folder, device_map="nonsense")


def test_accelerate_keeps_visits_together(tmp_path: Path) -> None:
    """On two devices, a layer's weights are on one of them; and from the disk, logits are the same."""
    from accelerate import infer_auto_device_map

    model = tiny_model()
    model.save_pretrained(tmp_path / "model")
    size = sum(p.numel() * 4 for p in model.parameters())
    memory = {0: size // 2 + 20_000, 1: size, "cpu": size}
    where = infer_auto_device_map(model, memory, no_split_module_classes=model._no_split_modules)
    devices = [where[f"model.layers.{i}"] for i in range(9)]
    assert set(devices) == {0, 1} and devices[1:4] == devices[4:7]
    offloaded = SmeltForCausalLM.from_pretrained(
        tmp_path / "model",
        device_map="auto",
        max_memory={"cpu": size // 2},
        offload_folder=tmp_path / "disk",
    )
    assert any(p.device.type == "meta" for p in offloaded.parameters())
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        assert (offloaded(ids).logits - model(ids).logits).abs().max() < 1e-5
    for change in (lambda: with_visits(offloaded, 3), lambda: checkpoint_of(offloaded)):
        with pytest.raises(SmeltscopeError, match="without offloading"):
            change()


def test_nothing_is_printed_and_settings_are_put_back(
    tiny_checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load_checkpoint(tiny_checkpoint)
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_extras_of_other_models_do_no_harm(tmp_path: Path, save_checkpoint: Save) -> None:
    """Buffers that old checkpoints stored, a head that is not used: loaded without them, as transformers does."""
    from safetensors.torch import load_file, save_file

    folder = save_checkpoint(tmp_path, "llama")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    weights["value_head.0.weight"] = torch.ones(4)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    load_model(folder)
    weights["model.layers.7.mlp.up_proj.weight"] = torch.ones(4, 4)  # a layer that would be lost
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SmeltscopeError, match=r"1 weights .* model\.layers\.7\."):
        load_model(folder)


def test_shipped_checkpoints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = shipped_checkpoints()
    assert "smelt-tiny" in names
    for name in names:
        folder = find_checkpoint(name)
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
            p.name for p in folder.iterdir()
        }
    checkpoint = load_checkpoint("smelt-tiny")
    assert checkpoint.model.config.num_visits == 2 and len(checkpoint.tokenizer) > 256
    # a folder of that name in the working directory is what the user means
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smelt-tiny").mkdir()
    assert find_checkpoint("smelt-tiny") == Path("smelt-tiny")


def test_what_is_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pickles and code are not even fetched unless they are asked for."""
    import huggingface_hub

    asked: list[list[str]] = []

    def snapshot_download(name: str, *, allow_patterns: list[str]) -> str:
        assert name == "someone/something"
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert find_checkpoint("someone/something") == tmp_path
    find_checkpoint("someone/something", allow_pickle=True, trust_remote_code=True)
    find_checkpoint("someone/something", weights=False, allow_pickle=True)
    assert not {"*.safetensors", "pytorch_model*.bin"} & set(asked[2])
    assert "*.safetensors" in asked[0]
    assert not {"*.py", "pytorch_model*.bin"} & set(asked[0])
    assert {"*.safetensors", "*.py", "pytorch_model*.bin"} <= set(asked[1])


def test_a_loaded_model_computes_bit_for_bit_what_the_saved_one_did(
    tmp_path: Path, save_checkpoint: Callable[..., Path]
) -> None:
    """Whatever the addresses that safetensors maps the weights to."""
    tokens = torch.arange(1, 41)[None]
    loaded = load_checkpoint(save_checkpoint(tmp_path), device="cpu").model
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, tiny_model(vocab_size=258)(tokens).logits)
