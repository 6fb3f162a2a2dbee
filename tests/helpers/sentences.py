"""What the product and its pages say: the texts of the code, and those of the pages."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import speq

ROOT = Path(speq.__file__).parent.parent
ROOMS = ("speq", "scheduler", "governor", "bench", "tools")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = [
    ROOT / "setup.py",
    *(file for room in ROOMS for file in sorted((ROOT / room).rglob("*.py"))),
]


@dataclass(frozen=True, slots=True)
class Said:
    """A text, and where it lies. What a program puts into it stands as {}."""

    file: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}"


def texts_of(file: Path) -> Iterator[Said]:
    """The texts in a file of Python, docstrings too; a page as a whole, paragraph by paragraph."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        yield from (Said(file, line, said) for line, said in literals(ast.parse(text)))
        return
    line = 1
    for paragraph in text.split("\n\n"):
        yield Said(file, line, paragraph)
        line += paragraph.count("\n") + 2


def literals(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Texts with their lines; neighbours are one text, and parts of a text are none."""
    inside = {
        part for each in ast.walk(tree) if isinstance(each, ast.JoinedStr) for part in each.values
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield (
                node.lineno,
                "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "{}"
                    for part in node.values
                ),
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inside:
            yield node.lineno, node.value
