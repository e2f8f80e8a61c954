"""How a prompt is laid out: two layouts of BIG-bench's task, and others from a small file."""

import re
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

from smeltscope.errors import SmeltscopeError

STOP = "\n"  # what ends an answer
INSTRUCTION = (
    "Complete the rest of the sequence, making sure that the parentheses are closed properly. \n\n"
)


@dataclass(frozen=True, kw_only=True)
class Template:
    """The text around inputs and answers, whose symbols are separated by spaces.

    A prompt is its shots, joined; the last one, the query's, ends before the answer. An answer ends
    with its line.
    """

    name: str
    shot: str = "Input: {input}\nOutput: {answer}"
    join: str = "\n"
    instruction: str = ""
    repeat: bool = False  # the instruction stands before every shot, not before the first alone

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[^{}]*\{input\}[^{}]*[^{}\s] \{answer\}", self.shot):
            raise SmeltscopeError(
                f"Template {self.name}: shot = {self.shot!r} needs {{input}}, then words, then a space and "
                'at its end {answer}, as in "Input: {input}\\nOutput: {answer}".'
            )
        if not self.join.lstrip(" ").startswith(STOP):
            raise SmeltscopeError(
                f"Template {self.name}: join = {self.join!r} must begin with a line break: an answer ends there."
            )

    @property
    def literals(self) -> tuple[str, str]:
        """What stands before an input, and what between it and its answer."""
        before, _, rest = self.shot.partition("{input}")
        return before, rest.removesuffix("{answer}")


TEMPLATES = {
    # The task's own few-shot form: its examples begin with a line break, and one more joins them.
    "bigbench": Template(name="bigbench", instruction=INSTRUCTION, join="\n\n"),
    # DCLM's: each example is an item's whole context, " ", its continuation; "\n" joins them.
    "dclm": Template(name="dclm", instruction=INSTRUCTION, repeat=True),
}


def read_template(source: str | Path | Template) -> Template:
    """A built-in template by its name, or one from a TOML file with the fields of `Template` but the name."""
    if isinstance(source, Template):
        return source
    if source in TEMPLATES:
        return TEMPLATES[str(source)]
    path = Path(source)
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SmeltscopeError(
            f"There is no template {source}: name {', '.join(TEMPLATES)} or a .toml file."
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SmeltscopeError(
            f"{path} cannot be read as TOML ({error}): see docs/dyck-prompts.md for a template."
        ) from None
    types = {field.name: field.type for field in fields(Template) if field.name != "name"}
    unknown = [key for key in found if key not in types]
    if unknown:
        raise SmeltscopeError(
            f"{path}: a template has no {', '.join(unknown)}; its keys are {', '.join(types)}."
        )
    for key, value in found.items():
        if type(value) is not types[key]:
            raise SmeltscopeError(
                f"{path}: {key} = {value!r} must be {'true or false' if types[key] is bool else 'text'}."
            )
    if "shot" not in found:
        raise SmeltscopeError(
            f'{path}: shot is missing, for example shot = "Input: {{input}}\\nOutput: {{answer}}".'
        )
    return Template(name=path.stem, **found)
