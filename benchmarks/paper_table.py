"""A geometry for each of the paper's 32 configurations, whose heads and expert widths it does not publish.

    python benchmarks/paper_table.py

paper_configurations.csv holds what is published (parameters in units of 1e9, S in percent, FLOPs and cache as ratios to the
Baseline in the same place), and, in its last four columns, the geometry. Printed is the table of docs/budgets.md: what
`smeltscope.model.budgets` counts, and what is published in brackets.
"""

import csv
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from smeltscope.model import SmeltConfig
from smeltscope.model.budgets import Budget, budget_of, sizes_of, sparsity

DOCUMENT_LENGTH = 800  # tokens: with it the ratios of the FLOPs come out
FILE = Path(__file__).with_name("paper_configurations.csv")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One of the paper's configurations, a geometry for it, and what that costs."""

    printed: dict[str, str]
    config: SmeltConfig
    budget: Budget
    flops_ratio: float  # to the Baseline, as the next
    cache_ratio: float
    sparsity: float  # in percent

    def counted(self) -> dict[str, float]:
        """What is counted, under the names of the published columns."""
        return {
            "active": self.budget.active_parameters / 1e9,
            "total": self.budget.parameters / 1e9,
            "flops_ratio": self.flops_ratio,
            "cache_ratio": self.cache_ratio,
            "sparsity": self.sparsity,
        }

    def excess(self, name: str) -> float:
        """By how much the counted figure differs from the published one, beyond the rounding of that: a share of it."""
        published, unit = float(self.printed[name]), 10.0 ** -decimals(self.printed[name])
        return max(abs(self.counted()[name] - published) - unit / 2, 0.0) / published


def rows() -> Iterator[Row]:
    """The 32 configurations: 16 Baselines, then 16 SMELTs."""
    with FILE.open(encoding="utf-8") as file:
        entries = list(csv.DictReader(file))
    half = len(entries) // 2
    budgets = [budget_of(sizes_of(config_of(e)), document_length=DOCUMENT_LENGTH) for e in entries]
    for i, (entry, budget) in enumerate(zip(entries, budgets, strict=True)):
        baseline = budgets[i % half]
        # S = 0 of the scale and architecture; its FLOPs by the published ratio, for those of a SMELT do not come out.
        ratio = float(entries[i // 4 * 4]["flops_ratio"])
        flops = ratio * budgets[i % half // 4 * 4].inference_flops
        dense = dataclasses.replace(budgets[i // 4 * 4], inference_flops=flops)
        yield Row(
            printed=entry,
            config=config_of(entry),
            budget=budget,
            flops_ratio=budget.training_flops / baseline.training_flops,
            cache_ratio=budget.cache_bytes / baseline.cache_bytes,
            sparsity=0 if is_dense(entry) else 100 * sparsity(budget, dense),
        )


def config_of(entry: dict[str, str]) -> SmeltConfig:
    number = {name: int(entry[name]) for name in ("visits", "layers", "width", "experts")}
    geometry = {n: int(entry[n]) for n in ("heads", "kv_heads", "head_size", "expert_width")}
    return SmeltConfig(
        num_visits=number["visits"],
        num_physical_layers=number["layers"],
        hidden_size=number["width"],
        num_experts=number["experts"],
        num_experts_per_tok=8,
        num_attention_heads=geometry["heads"],
        num_key_value_heads=geometry["kv_heads"],
        head_dim=geometry["head_size"],
        moe_intermediate_size=geometry["expert_width"],
        qk_norm=False,
        vocab_size=32_000,  # embeddings are not counted
    )


def is_dense(entry: dict[str, str]) -> bool:
    """Whether it is the S = 0 row of its scale and architecture."""
    return entry["sparsity"] == "0"


def decimals(printed: str) -> int:
    return len(printed.partition(".")[2])


def shown(row: Row, name: str) -> str:
    printed = row.printed[name]
    text = f"{row.counted()[name]:.{decimals(printed)}f}"
    return f"{text.removeprefix('0') if text.startswith('0.') else text} ({printed})"


def main() -> None:
    print(
        "| scale, visits | width | experts | heads / K/V x size | expert width | active, 1e9 |",
        end="",
    )
    print(" total, 1e9 | FLOPs ratio | cache ratio | S, % |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows():
        p, c = row.printed, row.config
        heads = f"{c.num_attention_heads} / {c.num_key_value_heads} x {c.head_dim}"
        figures = ["active", "total", "flops_ratio", "cache_ratio", "sparsity"]
        cells = [f"{p['scale']}, {p['visits']}", p["width"], p["experts"], heads, p["expert_width"]]
        print("| " + " | ".join([*cells, *(shown(row, name) for name in figures)]) + " |")


if __name__ == "__main__":
    main()
