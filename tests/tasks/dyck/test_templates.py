"""Templates: what the built-in ones write, and what a file may say."""

import pytest

from smeltscope.errors import SmeltscopeError
from smeltscope.tasks.dyck.templates import TEMPLATES, Template, read_template

SHOT = 'shot = "Input: {input}\\nOutput: {answer}"\n'


def test_built_in():
    for name, template in TEMPLATES.items():
        assert read_template(name) is template
        assert template.name == name
        assert template.literals == ("Input: ", "\nOutput: ")
        assert template.instruction.endswith("closed properly. \n\n")


def test_a_file(tmp_path):
    path = tmp_path / "arrows.toml"
    path.write_text('shot = "{input} => {answer}"\ninstruction = "Close: \\n"\nrepeat = true\n')
    template = read_template(path)
    assert template == read_template(str(path))
    assert template == Template(
        name="arrows", shot="{input} => {answer}", instruction="Close: \n", repeat=True
    )
    assert template.join == "\n"
    assert template.literals == ("", " => ")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (SHOT + 'prefix = "x"\nshots = 3\n', "no prefix, shots; its keys are shot, join, instr"),
        ('shot = "Input: {input}\\nOutput: "', "needs {input}, then words, then a space and"),
        ('shot = "Output: {answer}"', "needs {input}, then words"),
        ('shot = "{answer} closes {input}"', "needs {input}, then words"),
        ('shot = "{input} {answer}"', "needs {input}, then words"),
        ('shot = "{input} is {input} is {answer}"', "needs {input}, then words"),
        ('shot = "{input} =>{answer}"', "then a space"),
        ('shot = "{input}:\\n {answer}."', "at its end {answer}"),
        ('instruction = "Close."', "shot is missing"),
        (SHOT + 'join = " ; "', "must begin with a line break"),
        (SHOT + 'join = ""', "must begin with a line break"),
        (SHOT + "repeat = 1", "repeat = 1 must be true or false"),
        (SHOT + "instruction = 3", "instruction = 3 must be text"),
        ("shot = ", "cannot be read as TOML"),
    ],
)
def test_broken_files(tmp_path, content, words):
    path = tmp_path / "mine.toml"
    path.write_text(content)
    with pytest.raises(SmeltscopeError) as error:
        read_template(path)
    assert words in str(error.value)
    assert "mine" in str(error.value)


def test_no_such_template(tmp_path):
    with pytest.raises(SmeltscopeError, match=r"no template dlcm: name bigbench, dclm or a \.toml"):
        read_template("dlcm")
    with pytest.raises(SmeltscopeError, match="cannot be read as TOML"):
        read_template(tmp_path)
