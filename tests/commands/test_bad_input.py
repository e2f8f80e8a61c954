"""Whatever is wrong with what a user gives ends in one sentence that names it, exit code 2, nothing left behind."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Refused = Callable[..., str]


@pytest.fixture
def refused(
    probe: Callable[..., Any], tiny_checkpoint: Path, text_folder: Path, tmp_path: Path
) -> Refused:
    """Run attention-sink with something wrong, check all that holds for every refusal, return the sentence."""

    def check(
        *args: object,
        names: object,
        ckpt: object = tiny_checkpoint,
        data: object = text_folder,
        out: object = tmp_path / "x.h5",
    ) -> str:
        before = sorted(tmp_path.rglob("*"))
        given = ["--ckpt", ckpt, "--data", data, "--out", out, "-q", *args]
        result = probe("attention-sink", *given)
        assert result.code == 2, result.err
        assert result.out == ""
        lines = result.err.strip().splitlines()
        if lines[0].startswith("Usage: "):  # of a wrong option; the two lines of click stay
            assert lines[1].startswith("Try 'probe attention-sink --help'")
            lines = lines[3:]
        assert len(lines) == 1, result.err
        assert lines[0].startswith("Error: ")
        assert "Traceback" not in result.err
        assert str(names) in lines[0]
        assert sorted(tmp_path.rglob("*")) == before, "something was left behind"
        return lines[0]

    return check


@pytest.fixture
def broken(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint, to be broken."""
    return shutil.copytree(tiny_checkpoint, tmp_path / "ckpt")


def change_config(folder: Path, **changes: Any) -> None:
    """Change config.json by hand, None removing a key."""
    config = json.loads((folder / "config.json").read_text())
    # what is derived would contradict the change before the change itself is looked at
    config = {**config, "num_hidden_layers": None, "head_dim": None, **changes}
    text = json.dumps({key: value for key, value in config.items() if value is not None})
    (folder / "config.json").write_text(text)


# ---- the checkpoint


def test_a_checkpoint_that_is_not_there(refused: Refused, tmp_path: Path) -> None:
    assert "no checkpoint folder" in refused(ckpt=tmp_path / "nope", names=tmp_path / "nope")
    assert "shipped checkpoint" in refused(ckpt="smelt-tyni", names="smelt-tyni")


def test_a_checkpoint_that_is_a_file(refused: Refused, broken: Path) -> None:
    file = broken / "model.safetensors"
    assert "give the folder" in refused(ckpt=file, names=file)


def test_an_empty_folder(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "config.json" in refused(ckpt=tmp_path / "empty", names=tmp_path / "empty")


@pytest.mark.parametrize("content", [b"{ nope", b"\xff\xfe\x00", b"[]", b"{}", b""])
def test_a_broken_config(refused: Refused, broken: Path, content: bytes) -> None:
    (broken / "config.json").write_bytes(content)
    refused(ckpt=broken, names=broken / "config.json")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"loop_stop": 9}, "1:9 does not lie inside the stack of 6 layers"),
        ({"loop_start": 5}, "5:4 does not lie inside"),
        ({"num_visits": 0}, "num_visits is 0"),
        ({"num_attention_heads": 5}, "hidden_size 32 is not divisible by num_attention_heads 5"),
        ({"num_key_value_heads": 3}, "is not divisible by num_key_value_heads 3"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3"),
        ({"num_experts_per_tok": 99}, "num_experts_per_tok 99"),
        ({"hidden_size": "wide"}, "'hidden_size' expected int, got str"),
        ({"num_visits": "two"}, "'num_visits' expected int, got str"),
        ({"model_type": "nonesuch"}, "knows no model_type 'nonesuch'"),
    ],
)
def test_a_config_that_contradicts_itself(
    refused: Refused, broken: Path, changes: dict[str, Any], says: str
) -> None:
    change_config(broken, **changes)
    assert says in refused(ckpt=broken, names=broken / "config.json")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_physical_layers": 8}, "lacks or misshapes 22 weights"),  # two layers more
        ({"hidden_size": 64}, "lacks or misshapes"),
        ({"num_local_experts": 16}, "mlp.experts.down_proj"),
        ({"tie_word_embeddings": False}, "lm_head.weight"),
        ({"num_physical_layers": 5, "loop_start": 1, "loop_stop": 4}, "has no place for"),
        ({"qk_norm": False}, "self_attn.k_norm.weight"),
        ({"hidden_act": "nonesuch"}, "'nonesuch'"),
    ],
)
def test_weights_of_another_config(
    refused: Refused, broken: Path, changes: dict[str, Any], says: str
) -> None:
    """Never random weights, never weights left out in silence."""
    change_config(broken, **changes)
    assert says in refused(ckpt=broken, names=broken)


def test_weights_of_another_model(
    refused: Refused, broken: Path, save_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    other = save_checkpoint(tmp_path / "llama", "llama")
    shutil.copy(other / "model.safetensors", broken / "model.safetensors")
    refused(ckpt=broken, names=broken)
    change_config(other, num_hidden_layers=2, head_dim=8)  # a layer of the three left out
    assert "model.layers.2." in refused(ckpt=other, names=other)


def test_no_weights(refused: Refused, broken: Path) -> None:
    (broken / "model.safetensors").unlink()
    assert "no *.safetensors weights" in refused(ckpt=broken, names=broken)


@pytest.mark.parametrize("keep", [0, 4, 1000, -1])
def test_truncated_weights(refused: Refused, broken: Path, keep: int) -> None:
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "copy or save it again" in refused(ckpt=broken, names=file)


def test_shards_that_are_missing(refused: Refused, tmp_path: Path) -> None:
    from smeltscope.model import tiny

    folder = tmp_path / "sharded"
    tiny().save_pretrained(folder, max_shard_size="60KB")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    refused(ckpt=folder, names=shard)
    index = folder / "model.safetensors.index.json"
    index.write_text("{")
    refused(ckpt=folder, names=index)
    index.unlink()
    refused(ckpt=folder, names=index)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_without_a_value(refused: Refused, broken: Path, value: float) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(broken / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    weights[name][0, 0] = value
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    assert name in refused(ckpt=broken, names=broken)


def test_pickled_weights(refused: Refused, broken: Path, probe: Any, text_folder: Path) -> None:
    import torch
    from safetensors.torch import load_file

    pickle = broken / "pytorch_model.bin"
    torch.save(load_file(broken / "model.safetensors"), pickle)
    (broken / "model.safetensors").unlink()
    assert "pass --allow-pickle" in refused(ckpt=broken, names=pickle)
    out = broken / "x.h5"
    given = ["--ckpt", broken, "--data", text_folder, "--out", out, "--tokens", 200]
    assert probe("attention-sink", *given, "--allow-pickle").code == 0
    pickle.write_bytes(b"nonsense")
    assert "convert them" in refused("--allow-pickle", ckpt=broken, names=broken)


class Evil:
    """A pickle that would leave a file behind when it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.file}",)


def test_a_pickle_with_code_is_not_run(refused: Refused, broken: Path, tmp_path: Path) -> None:
    import torch

    (broken / "model.safetensors").unlink()
    torch.save({"weight": Evil(tmp_path / "ran")}, broken / "pytorch_model.bin")
    refused("--allow-pickle", ckpt=broken, names=broken)
    assert not (tmp_path / "ran").exists()


def test_code_of_a_checkpoint(refused: Refused, broken: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (broken / "configuration_mine.py").write_text(f"open({str(ran)!r}, 'w')\n")
    change_config(broken, model_type="mine", auto_map={"AutoConfig": "configuration_mine.Mine"})
    assert "pass --trust-remote-code" in refused(ckpt=broken, names=broken)
    assert not ran.exists()


def test_models_that_are_no_decoder(
    refused: Refused, save_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    import transformers

    sizes = {"vocab_size": 258, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    bert = transformers.BertConfig(**sizes, intermediate_size=64)
    transformers.BertForMaskedLM(bert).save_pretrained(tmp_path / "bert")
    sentence = refused(ckpt=tmp_path / "bert", names=tmp_path / "bert")
    assert "see later tokens" in sentence
    t5 = transformers.T5Config(vocab_size=258, d_model=32, d_kv=8, d_ff=64, num_layers=2)
    transformers.T5ForConditionalGeneration(t5).save_pretrained(tmp_path / "t5")
    assert "no causal language model" in refused(ckpt=tmp_path / "t5", names=tmp_path / "t5")


def test_a_model_that_cannot_be_captured(
    refused: Refused, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """Bloom computes attention by itself: refused by name, not measured wrongly."""
    import transformers

    folder = shutil.copytree(
        tiny_checkpoint, tmp_path / "bloom", ignore=shutil.ignore_patterns("*.safetensors", "c*")
    )
    bloom = transformers.BloomConfig(vocab_size=258, hidden_size=32, n_layer=2, n_head=4)
    transformers.BloomForCausalLM(bloom).save_pretrained(folder)
    refused(ckpt=folder, names="Bloom")


def test_visits_of_a_model_without_a_loop(
    refused: Refused, save_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path / "llama", "llama")
    assert "--visits" in refused("--visits", 2, ckpt=folder, names=folder)


# ---- the hub


def test_a_hub_name_that_is_not_there(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "network" in refused(ckpt="someone/something", names="someone/something")
    assert "check the name" in refused(ckpt="some one/some thing", names="some one/some thing")


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_not_waited_for(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    begin = time.monotonic()
    refused(ckpt="someone/something", names="someone/something")
    assert time.monotonic() - begin < 60


# ---- the tokenizer and the text


def test_a_tokenizer_with_more_ids_than_the_model(
    refused: Refused, save_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path / "small", vocab_size=100)
    sentence = refused(ckpt=folder, names="text.jsonl")
    assert "the model's vocabulary has 100 entries" in sentence


def test_a_tokenizer_that_is_missing_or_broken(refused: Refused, broken: Path) -> None:
    (broken / "tokenizer.json").write_text("{")
    assert "save it there again" in refused(ckpt=broken, names=broken)
    for file in broken.glob("tokenizer*"):
        file.unlink()
    assert "no tokenizer" in refused(ckpt=broken, names="text.jsonl")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.txt", b"", "is empty"),
        ("noise.txt", bytes(range(256)) * 8, "not UTF-8"),
        ("nul.txt", b"abc\0def" * 99, "binary"),
        ("broken.jsonl", b'{"text": "fine text"}\n{"text": brok\n', "line 2 is broken JSON"),
        ("untexted.jsonl", b'{"words": "fine text"}\n', "row 1 has no `text`"),
        ("short.txt", b"a", "a segment needs two real tokens"),
        ("letter.docx", b"Dear reader", "unknown ending"),
        ("array.npy", b"\x93NUMPY", "not a readable .npy file"),
        ("numbers.bin", b"\0\1" * 99, "--token-dtype"),
        ("packed.jsonl.gz", b"\x1f\x8b\x08\0", "damaged"),
    ],
)
def test_text_that_cannot_be_used(
    refused: Refused, tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    assert says in refused(data=file, names=file)


def test_data_that_is_not_there(refused: Refused, tmp_path: Path) -> None:
    assert "--data" in refused(data=tmp_path / "nope.txt", names=tmp_path / "nope.txt")
    (tmp_path / "empty").mkdir()
    assert "holds no file to read" in refused(data=tmp_path / "empty", names=tmp_path / "empty")


def test_token_ids_that_the_model_lacks(refused: Refused, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(300))
    assert "reach 299" in refused(data=tmp_path / "ids.npy", names="ids.npy")


# ---- the options


@pytest.mark.parametrize(
    "args",
    [
        ("--tokens", "0"),
        ("--tokens", "abc"),
        ("--tokens", "-5"),
        ("--tokens", "2"),
        ("--max-length", "0"),
        ("--max-length", "2"),
        ("--max-length", "9999"),
        ("--batch-tokens", "3"),
        ("--dtype", "float64"),
        ("--device", "gpu"),
        ("--device", "cpu:3"),
        ("--visits", "-1"),
        ("--visits", "two"),
        ("--seed", "-1"),
        ("--split-token", "-1"),
        ("--nonesuch", "1"),
    ],
)
def test_options_with_a_wrong_value(refused: Refused, args: tuple[str, str]) -> None:
    refused(*args, names=args[0])


def test_cuda_that_is_not_there(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--device cpu" in refused("--device", "cuda", names="CUDA")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "finds 2 CUDA devices" in refused("--device", "cuda:2", names="cuda:2")


# ---- where results go


@pytest.mark.parametrize("option", ["--out", "--html"])
def test_an_output_that_cannot_be_written(refused: Refused, tmp_path: Path, option: str) -> None:
    assert "make it first" in refused(option, tmp_path / "no" / "x.y", names=tmp_path / "no")
    (tmp_path / "folder").mkdir()
    assert "is a folder" in refused(option, tmp_path / "folder", names=f"{option} {tmp_path}")
    kept = tmp_path / "kept"
    kept.write_text("mine")
    assert "--force" in refused(option, kept, names=kept)
    assert kept.read_text() == "mine"
    if Path("/proc/self").exists():  # a folder that nobody may write to, not even root
        assert "cannot be written" in refused(option, "/proc/x.y", names=f"{option} /proc/x.y")


def test_page_and_run_file_of_one_name(refused: Refused, tmp_path: Path) -> None:
    same = tmp_path / "y" / ".." / "x.h5"
    (tmp_path / "y").mkdir()
    assert "different files" in refused("--html", same, names="--html and --out")


def test_a_run_file_begun_by_another_run(
    refused: Refused, tmp_path: Path, probe: Any, tiny_checkpoint: Path, text_folder: Path
) -> None:
    partial = tmp_path / "x.h5.partial"
    partial.write_text("no run at all")
    assert "no run that can be resumed" in refused(names=partial)
    assert partial.read_text() == "no run at all"


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, check=False).returncode:
        pytest.skip("mounting a small file system needs the rights of root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(refused: Refused, full_disk: Path, tmp_path: Path) -> None:
    sentence = refused(out=full_disk / "x.h5", names=full_disk / "x.h5")
    assert "disk is full" in sentence


def test_a_full_disk_for_the_page(
    probe: Any, full_disk: Path, tmp_path: Path, tiny_checkpoint: Path, text_folder: Path
) -> None:
    """The run is kept: only the page is missing."""
    given = ["--ckpt", tiny_checkpoint, "--data", text_folder, "--tokens", 300, "-q"]
    given += ["--out", tmp_path / "x.h5", "--html", full_disk / "x.html"]
    result = probe("attention-sink", *given)
    assert result.code == 2
    assert str(full_disk / "x.html") in result.err
    assert (tmp_path / "x.h5").exists()
    assert list(full_disk.iterdir()) == []


def test_debug_shows_the_traceback(probe: Any, tmp_path: Path) -> None:
    result = probe("--debug", "attention-sink", "--ckpt", tmp_path / "nope")
    assert result.code == 2
    assert "Traceback" in result.err
    assert result.err.strip().splitlines()[-1].startswith("Error: There is no checkpoint folder")
