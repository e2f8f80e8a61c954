"""`smelt info`: what a configuration costs, and how sparse it is.

smelt info baseline-tiny smelt-tiny
smelt info recipe.toml --document-length 800
"""

from typing import TYPE_CHECKING, Any

import click

from smeltscope.commands.options import TokenCount
from smeltscope.commands.terminal import make_output, number, print_json

if TYPE_CHECKING:
    from transformers import Qwen3MoeConfig

# Names in --json, and the lines of the table.
LINES = {
    "parameters": "parameters",
    "active_parameters": "  active, one traversal",
    "embedding_parameters": "  embeddings and head, apart",
    "inference_flops": "FLOPs per token, inference",
    "inference_flops_full_square": "  with the full square",
    "training_flops": "FLOPs per token, training",
    "training_flops_full_square": "  with the full square",
    "head_flops": "  of the head, apart, inference",
    "cache_bytes": "KV cache, bytes per token",
    "sparsity": "sparsity S",
}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option(
    "--document-length",
    type=TokenCount(),
    metavar="N",
    help="Tokens that attention reaches back over: the length of documents. [default: the context]",
)
@click.option(
    "--dense",
    metavar="NAME",
    help="The configuration that defines S = 0. [default: the same layers run once, all experts active]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON.")  # fmt: skip
def info(
    names: tuple[str, ...], document_length: int | None, dense: str | None, as_json: bool
) -> None:
    """Parameters, FLOPs, KV cache and sparsity of configurations.

    NAME is a shipped checkpoint, a control, a folder, a name on the hub, a config.json, or a recipe. Of several, the
    differences to the first are shown. The cache is that of bfloat16; attention is causal.
    """
    from rich.table import Table

    from smeltscope.errors import SmeltscopeError
    from smeltscope.model.budgets import has_sizes
    from smeltscope.model.config_files import load_config

    configs = {name: load_config(name) for name in names}
    reference = None if dense is None else load_config(dense)
    if reference is not None and not has_sizes(reference):
        raise SmeltscopeError(
            f"--dense {dense} is a {reference.model_type}: S is relative to a SMELT, a Baseline or a Qwen3-MoE."
        )
    counts = {name: count(c, document_length, reference) for name, c in configs.items()}
    if as_json:
        print_json(counts)
        return
    console = make_output()
    for name, config in configs.items():
        console.print(f"{name}: {describe(config)}", soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for header in ("", *counts):
        table.add_column(header, justify="right" if header else "left", no_wrap=not header)
    first = counts[names[0]]
    for key, line in LINES.items():
        table.add_row(line, *(_cell(key, c, first) for c in counts.values()))
    console.print(table)
    others = [name for name, config in configs.items() if not has_sizes(config)]
    if others:
        console.print(
            "FLOPs, cache and sparsity are counted for SMELTs, Baselines, and Qwen3-MoEs with experts in every layer; "
            f"not for {', '.join(others)}."
        )
    if len(others) < len(names):
        lengths = {c["document_length"] for c in counts.values() if "document_length" in c}
        console.print(
            f"Documents of {' and '.join(map(str, sorted(lengths)))} tokens; cache in bfloat16; S = 0 is "
            f"{dense or 'the same layers run once with all experts active'}.",
            style="dim",
        )


def count(
    config: Any, document_length: int | None, dense: "Qwen3MoeConfig | None" = None
) -> dict[str, Any]:
    """The numbers of `LINES`; of a model whose sizes are not known, its parameters alone."""
    from smeltscope.model.budgets import (
        budget_of,
        count_parameters,
        dense_counterpart,
        has_sizes,
        sizes_of,
        sparsity,
    )

    if not has_sizes(config):
        parameters, at_ends = count_parameters(config)
        return {"parameters": parameters, "embedding_parameters": at_ends}
    length = length_of(config, document_length)
    sizes = sizes_of(config)
    budget = budget_of(sizes, document_length=length)
    reference = dense_counterpart(sizes) if dense is None else sizes_of(dense)
    return {
        "document_length": length,
        "parameters": budget.parameters,
        "active_parameters": budget.active_parameters,
        "embedding_parameters": budget.embedding_parameters,
        "inference_flops": budget.inference_flops,
        "inference_flops_full_square": budget.full_square_flops,
        "training_flops": budget.training_flops,
        "training_flops_full_square": 3 * budget.full_square_flops,
        "head_flops": budget.head_flops,
        "cache_bytes": budget.cache_bytes,
        "sparsity": sparsity(budget, budget_of(reference, document_length=length)),
    }


def length_of(config: "Qwen3MoeConfig", given: int | None) -> int:
    """The length of documents that was asked for, or the context."""
    from smeltscope.errors import SmeltscopeError

    context = config.max_position_embeddings
    if given is not None and given > context:
        raise SmeltscopeError(
            f"--document-length {given} exceeds the context of the model; give {context} or less."
        )
    return given or context


def describe(config: Any) -> str:
    """A configuration in a line."""
    from smeltscope.errors import SmeltscopeError
    from smeltscope.model import executions_of
    from smeltscope.model.budgets import has_sizes, sizes_of

    if not has_sizes(config):
        try:
            return f"{config.model_type}, {len(executions_of(config))} executions"
        except SmeltscopeError:
            return config.model_type
    sizes = sizes_of(config)
    loop = "each run once"
    if sizes.executions > sizes.layers:
        span = config.span
        loop = f"{span.start} to {span.stop - 1} run {config.num_visits} times"
        loop += f" ({sizes.executions} executions)"
    kind = "" if config.model_type == "smelt" else f"{config.model_type}, "
    return (
        f"{kind}{sizes.layers} layers, {loop}; width {sizes.width}; {sizes.heads} heads "
        f"of size {sizes.head_size} on {sizes.kv_heads} K/V heads; {sizes.experts} experts of width "
        f"{sizes.expert_width}, {sizes.active_experts} active"
    )


def _cell(key: str, counts: dict[str, Any], first: dict[str, Any]) -> str:
    if key not in counts:
        return "-"
    if key == "sparsity":
        return number(counts[key])
    text = f"{counts[key]:,.0f}"
    if counts is first or key not in first:
        return text
    return f"{text} ({100 * (counts[key] / first[key] - 1):+.2f} %)"
