"""What a training reads: tokenizer and rows of a recipe, made once and kept in its output folder."""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np

from smeltscope.errors import SmeltscopeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from smeltscope.model.recipe import BackcopySource, DyckSource, Recipe
    from smeltscope.model.rows import Rows, Segment
    from smeltscope.tasks.dyck import ItemSet
    from smeltscope.tasks.text import HeldOut

LOT = 4_000_000  # characters of a category that are tokenized, and packed, together
CHUNK = 256  # Dyck prompts that are made, and packed, together


def prepare(recipe: "Recipe", output: Path, *, quiet: bool) -> None:
    """Make the tokenizer and the rows of a run, and keep them in its folder."""
    from smeltscope.model.recipe import DyckSource
    from smeltscope.model.rows import join_rows, save_rows
    from smeltscope.model.run_folder import keep_sizes
    from smeltscope.model.streams import interleave, take_turns
    from smeltscope.model.training import build_config

    def say(text: str) -> None:
        if not quiet:
            click.echo(text, err=True)

    for source in recipe.mixture:  # what is wrong with them is told before the long part
        if isinstance(source, DyckSource):
            _item_sets(source, max(source.shots), [0], heldout=False)

    def read(name: str, paths: tuple[Path, ...]) -> dict[str, list[str]]:
        broken: list[str] | None = [] if recipe.data.broken_lines == "skip" else None
        texts = _read(paths, broken)
        if not texts:
            raise SmeltscopeError("The text holds no documents: check [data] in the recipe.")
        if broken:
            click.echo(f"skipped {len(broken)} broken lines, the first: {broken[0]}", err=True)
        _check_texts(name, texts, recipe)
        return texts

    say("reading the text")
    keep_sizes(output, sizes_of_text(recipe))
    texts, heldout = read("train", recipe.data.train), read("heldout", recipe.data.heldout)
    if recipe.tokenizer.path is None:
        say("learning the tokenizer")
    tokenizer = _tokenizer(recipe, texts)
    build_config(recipe, tokenizer)  # as above
    tokenizer.save_pretrained(output / "tokenizer")

    weights = [source.weight for source in recipe.mixture]
    turns = take_turns(weights, recipe.training.total_steps * recipe.batch_rows)
    say("making the held-out rows")
    kept = recipe.data.heldout_tokens // recipe.data.context
    numbers = [round(kept * weight / sum(weights)) for weight in weights]
    few = join_rows(_parts(recipe, tokenizer, heldout, numbers, heldout=True))
    heldout.clear()
    say("making the training rows")
    numbers = np.bincount(turns, minlength=len(weights)).tolist()
    rows = interleave(_parts(recipe, tokenizer, texts, numbers, heldout=False), turns)
    save_rows(output / "rows.npz", train=rows, heldout=few)


def sizes_of_text(recipe: "Recipe") -> dict[str, int]:
    """{file: its bytes}, of all text that a recipe names; files of one name together."""
    from smeltscope.tasks.files import find_files

    sizes = Counter[str]()
    for paths in (recipe.data.train, recipe.data.heldout):
        for file in find_files(paths)[0]:
            inside = file.path.rglob("*") if file.path.is_dir() else [file.path]
            sizes[file.name] += sum(part.stat().st_size for part in inside)
    return dict(sizes)


def _check_texts(name: str, texts: dict[str, list[str]], recipe: "Recipe") -> None:
    """Refuse categories that hold nothing, are no source's, or have a source's name."""
    from smeltscope.model.recipe import TextSource

    where = f"[data] {name}"
    for category, members in texts.items():
        if not any(members):
            raise SmeltscopeError(
                f"{where}: all documents of the category {category!r} are empty; leave their file out, or mend it."
            )
    for source in recipe.mixture:
        if isinstance(source, TextSource):
            for category in source.categories:
                if category not in texts:
                    raise SmeltscopeError(
                        f"[[mixture]] {source.name} names the category {category!r}, which {where} lacks: it has "
                        f"{', '.join(texts)}."
                    )
        elif source.name in texts:
            raise SmeltscopeError(
                f"[[mixture]] {source.name} has the name of a category of {where}: give it another."
            )


def _tokenizer(recipe: "Recipe", texts: dict[str, list[str]]) -> "PreTrainedTokenizerBase":
    """The tokenizer that the recipe names, or one that is learned from the text."""
    from smeltscope.model.loading import load_tokenizer
    from smeltscope.model.tokenizer import train_tokenizer

    if recipe.tokenizer.vocab_size is not None:
        return train_tokenizer(
            _excerpt(_drawn(texts, recipe), recipe.tokenizer.characters),
            vocab_size=recipe.tokenizer.vocab_size,
            max_length=recipe.model.get("max_position_embeddings", recipe.data.context),
        )
    assert recipe.tokenizer.path is not None
    if not recipe.tokenizer.path.is_dir():
        raise SmeltscopeError(f"[tokenizer] path {recipe.tokenizer.path} is no folder.")
    tokenizer = load_tokenizer(recipe.tokenizer.path)
    if tokenizer is None:
        raise SmeltscopeError(f"[tokenizer] path {recipe.tokenizer.path} holds no tokenizer.")
    return tokenizer


def _parts(
    recipe: "Recipe",
    tokenizer: "PreTrainedTokenizerBase",
    texts: dict[str, list[str]],
    numbers: Sequence[int],
    *,
    heldout: bool,
) -> list["Rows"]:
    """Rows of each source of the mixture, in their order: `numbers` of them, at least one of a category."""
    from smeltscope.model.recipe import BackcopySource, DyckSource
    from smeltscope.model.rows import lay_rows

    context, pad = recipe.data.context, tokenizer.pad_token_id
    lots = {c: _lots(members, recipe, tokenizer) for c, members in _drawn(texts, recipe).items()}
    # Of each category: what is copied comes from it, however long the run.
    first = {category: next(of_category) for category, of_category in lots.items()}
    parts = []
    for source, number in zip(recipe.mixture, numbers, strict=True):
        seed = _seed(recipe, source.name, heldout)
        if isinstance(source, DyckSource):
            part = _dyck_rows(recipe, source, tokenizer, max(number, 1), seed, heldout=heldout)
        elif isinstance(source, BackcopySource):
            copies = _copies(recipe, source, tokenizer, first, max(number, 1), seed)
            part = lay_rows({source.name: list(copies)}, context=context, pad=pad)
        else:
            segments = {
                (i, c): chain([first[c]], lots[c])
                for i, c in enumerate(texts)
                if c in (source.categories or texts)
            }
            part = _text_rows(recipe, segments, pad, max(number, len(segments)))
        parts.append(part)
    return parts


def _text_rows(
    recipe: "Recipe",
    lots: Mapping[tuple[int, str], Iterable[list["Segment"]]],
    pad: int,
    count: int,
) -> "Rows":
    """`count` rows, the (number, category) in turn; of each no more lots than these need."""
    from smeltscope.model.rows import join_rows, lay_rows, turns_of_rows

    parts = []
    for turn, ((number, category), of_category) in enumerate(lots.items()):
        wanted, made = len(range(turn, count, len(lots))), list["Rows"]()
        for segments in of_category:
            rows = lay_rows(
                {category: segments},
                context=recipe.data.context,
                pad=pad,
                packed=recipe.data.packed,
            )
            drawn = np.random.default_rng([recipe.seed, number, 0, len(made)])
            made.append(rows.take(drawn.permutation(len(rows))))
            if sum(map(len, made)) >= wanted:
                break
        parts.append(join_rows(made))
    rows = join_rows(parts)
    return rows.take(turns_of_rows(rows, count=count, seed=recipe.seed))


def _seed(recipe: "Recipe", name: str, heldout: bool) -> int:
    """One for all that is drawn for a source."""
    from smeltscope.model.streams import seed_of

    return seed_of(recipe.seed, name, "heldout" if heldout else "train")


def _copies(
    recipe: "Recipe",
    source: "BackcopySource",
    tokenizer: "PreTrainedTokenizerBase",
    segments: dict[str, list["Segment"]],
    count: int,
    seed: int,
) -> Iterator["Segment"]:
    from smeltscope.model.streams import backcopy, random_tokens, stretches_of

    shortest, longest = source.lengths
    if source.stretches == "random":
        plain = np.setdiff1d(np.arange(len(tokenizer)), tokenizer.all_special_ids)
        draw = random_tokens(plain)
    else:
        draw = stretches_of(segments, end=tokenizer.eos_token_id, shortest=shortest)
    return backcopy(
        draw,
        count=count,
        context=recipe.data.context,
        start=tokenizer.bos_token_id,
        lengths=(shortest, longest),
        copies_only=source.loss == "copies",
        seed=seed,
    )


def _dyck_rows(
    recipe: "Recipe",
    source: "DyckSource",
    tokenizer: "PreTrainedTokenizerBase",
    count: int,
    seed: int,
    *,
    heldout: bool,
) -> "Rows":
    """`count` rows of prompts; those of a chunk share rows and stand in an order drawn anew."""
    from smeltscope.model.rows import join_rows, lay_rows
    from smeltscope.model.streams import seed_of

    chunks: list[Rows] = []
    while sum(map(len, chunks)) < count:
        drawn = seed_of(seed, len(chunks))
        prompts = _prompts(recipe, source, tokenizer, drawn, heldout=heldout)
        rows = lay_rows(
            {source.name: prompts},
            context=recipe.data.context,
            pad=tokenizer.pad_token_id,
            packed=recipe.data.packed,
        )
        chunks.append(rows.take(np.random.default_rng(drawn).permutation(len(rows))))
    return join_rows(chunks).take(np.arange(count))


def _prompts(
    recipe: "Recipe",
    source: "DyckSource",
    tokenizer: "PreTrainedTokenizerBase",
    seed: int,
    *,
    heldout: bool,
) -> list["Segment"]:
    """A chunk of prompts, each with its answer and the end token.

    Numbers of shots are drawn from the source's; a prompt that is too long gets the next smaller one.
    """
    from smeltscope.model.rows import Segment
    from smeltscope.tasks import dyck

    template = dyck.read_template(source.template)
    shots = sorted(set(source.shots), reverse=True)
    drawn = np.random.default_rng(seed).choice(source.shots, size=CHUNK)
    segments: dict[int, Segment] = {}
    for k in shots:
        members = [i for i in range(CHUNK) if drawn[i] >= k and i not in segments]
        if not members:
            continue
        made = dyck.make_prompts(
            _item_sets(source, k, [seed + i for i in members], heldout=heldout),
            tokenizer,
            shots=[k],
            template=template,
            context=2**31,  # it would drop the last demonstrations, and with them what they reveal
            seed=0,
        )
        for prompt, i in enumerate(members):
            tokens = np.append(made.segment(prompt), np.int32(tokenizer.eos_token_id))
            if len(tokens) <= recipe.data.context:
                answered = _answered(made, prompt)
                predicted = answered if source.loss == "answers" else np.arange(len(tokens)) > 0
                segments[i] = Segment(tokens=tokens, predicted=predicted)
            elif k == shots[-1]:
                raise SmeltscopeError(
                    f"[[mixture]] {source.name}: a prompt of {k} shots has {len(tokens)} tokens, more "
                    f"than context {recipe.data.context}: list fewer shots or give shorter lengths."
                )
    return [segments[i] for i in range(CHUNK)]


def _item_sets(
    source: "DyckSource", shots: int, seeds: Sequence[int], *, heldout: bool
) -> list["ItemSet"]:
    """A query and its demonstrations for each seed."""
    from smeltscope.tasks import dyck

    shortest, longest = source.lengths
    return [
        dyck.generate_sets(
            1,
            shots,
            seed,
            pairing=source.pairing,
            reveal=source.reveal,
            lengths=(shortest, longest),
            heldout_maps=heldout,
        )[0]
        for seed in seeds
    ]


def _answered(made: "HeldOut", i: int) -> np.ndarray:
    """Which tokens of a prompt, the end token included, answer: symbols, spaces around them, what ends them."""
    prompts = made.prompts
    assert prompts is not None
    answers = [prompts.region_names.index(f"{whose}_answer") for whose in ("demo", "query")]
    symbol = np.append(np.isin(prompts.regions[i], answers), False)
    blank = np.array([prompts.vocabulary[token].isspace() for token in made.segment(i)] + [True])
    near = np.append(symbol[1:], False) | np.append(False, symbol[:-1])
    return symbol | (blank & near)


def _read(paths: tuple[Path, ...], broken: list[str] | None) -> dict[str, list[str]]:
    """{category: the texts of its documents}, in the order of the files."""
    from smeltscope.tasks.files import documents, find_files, quiet_datasets

    texts: dict[str, list[str]] = {}
    files, _ = find_files(paths)
    with quiet_datasets():
        for file in files:
            for document in documents(file, broken=broken):
                if not isinstance(document.content, str):
                    raise SmeltscopeError(f"{file.path} holds tokens: training reads text.")
                texts.setdefault(document.category, []).append(document.content)
    return texts


def _drawn(texts: dict[str, list[str]], recipe: "Recipe") -> dict[str, list[str]]:
    """The documents of every category in an order drawn from the recipe's seed."""
    return {
        category: random.Random(f"{recipe.seed} {category}").sample(members, len(members))
        for category, members in texts.items()
    }


def _excerpt(texts: dict[str, list[str]], characters: int) -> Iterator[str]:
    """The first documents of every category, each category with the same share."""
    for members in texts.values():
        left = characters // len(texts)
        for text in members:
            if left <= 0:
                break
            yield text[:left]
            left -= len(text)


def _lots(
    members: Sequence[str], recipe: "Recipe", tokenizer: "PreTrainedTokenizerBase"
) -> Iterator[list["Segment"]]:
    """The segments of documents, some documents at a time: only as many are tokenized as are asked for."""
    from smeltscope.model.rows import cut_document

    begin = 0
    while begin < len(members):
        end, size = begin, 0
        while end < len(members) and size < LOT:
            size += len(members[end])
            end += 1
        encoded = tokenizer(
            members[begin:end],
            add_special_tokens=False,
            return_attention_mask=False,
            verbose=False,
        )
        yield [
            segment
            for ids in encoded["input_ids"]
            for segment in cut_document(
                ids,
                context=recipe.data.context,
                start=tokenizer.bos_token_id,
                end=tokenizer.eos_token_id,
            )
        ]
        begin = end
