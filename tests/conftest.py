"""What several folders of tests share: tiny checkpoints, a text to run on, and the command in this process."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# Nothing here may reach for a server: a test that needs the hub says so itself.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

VOCABULARY = 258  # the bytes, and a start and an end token
TEXT = {
    "prose": "The second visit reads what the first one wrote, and writes again. ",
    "code": "def visit(layer, times):\n    return [layer(x) for _ in range(times)]\n",
    "sums": "17 + 25 = 42; 42 * 3 = 126; 126 - 99 = 27; 27 / 9 = 3.\n",
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a command ended and what it wrote."""

    code: int
    out: str
    err: str


def make_byte_tokenizer(
    *, adds_start: bool = False, model_max_length: int = 512, **special: str
) -> Any:
    """A tokenizer whose tokens are bytes, <s> 256 and </s> 257: no training, no download."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate([*alphabet, "<s>", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if adds_start:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 256)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=model_max_length, **special
    )


@pytest.fixture(scope="session")
def byte_tokenizer() -> Callable[..., Any]:
    """`make_byte_tokenizer`, for tests."""
    return make_byte_tokenizer


@pytest.fixture(scope="session")
def save_checkpoint() -> Callable[..., Path]:
    """Save a tiny model of some kind and a tokenizer: `save(folder, "llama", num_hidden_layers=2)`."""
    from smeltscope.model import tiny

    def save(
        folder: Path, kind: str = "smelt", *, with_tokenizer: bool = True, **overrides: Any
    ) -> Path:
        size = {} if kind == "inkling2_loop" else {"vocab_size": VOCABULARY}
        tiny(kind, **{**size, **overrides}).save_pretrained(folder)
        if with_tokenizer:
            make_byte_tokenizer(bos_token="<s>", eos_token="</s>").save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="session")
def tiny_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, save_checkpoint: Callable[..., Path]
) -> Path:
    """A SMELT of random weights: 6 layers, 3 of them looped, 2 visits, 4 heads. Don't write into it."""
    return save_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny")


@pytest.fixture(scope="session")
def short_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layout of Dyck prompts with hardly a word, so that prompts of bytes are short."""
    file = tmp_path_factory.mktemp("template") / "short.toml"
    file.write_text('shot = "{input}: {answer}"')
    return file


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a .jsonl file of three categories, four documents each. Don't write into it."""
    import json

    folder = tmp_path_factory.mktemp("text")
    with (folder / "text.jsonl").open("w") as file:
        for number in range(4):
            for category, text in TEXT.items():
                row = {"text": f"{number}. " + text * (2 + number), "category": category}
                file.write(json.dumps(row) + "\n")
    return folder


@pytest.fixture
def probe(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run `probe ...` in this process: `probe("attention-sink", "--ckpt", folder)`."""
    from smeltscope.cli import probe, run

    def call(*args: object) -> Result:
        capsys.readouterr()
        code = run(probe, [str(arg) for arg in args])
        captured = capsys.readouterr()
        return Result(code=code, out=captured.out, err=captured.err)

    return call


@pytest.fixture(scope="session")
def probe_process() -> Callable[..., Result]:
    """Run `python -m smeltscope probe ...` in a process of its own: seconds, most of them imports."""

    def call(
        *args: object, cwd: Path | None = None, python: Sequence[str] = (sys.executable,)
    ) -> Result:
        done = subprocess.run(
            [*python, "-m", "smeltscope", "probe", *map(str, args)],
            check=False,
            capture_output=True,
            text=True,
            cwd=cwd,
            timeout=120,
        )
        return Result(code=done.returncode, out=done.stdout, err=done.stderr)

    return call
