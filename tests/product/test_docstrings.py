"""Docstrings begin with a verb or a noun phrase, and a class name stands for one class."""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = [file for name in ("speq", "scheduler", "governor") for file in (ROOT / name).rglob("*.py")]
REFUSED = {"Of", "As", "That", "Whether", "Where"}


@cache
def nodes() -> list[tuple[str, ast.AST]]:
    return [
        (f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", node)
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
    ]


def test_first_words_of_docstrings() -> None:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [(at, ast.get_docstring(node)) for at, node in nodes() if isinstance(node, kinds)]
    assert sum(text is not None for _, text in found) > 1000
    assert [at for at, text in found if text and text.split(None, 1)[0] in REFUSED] == []


def test_class_names_are_used_once() -> None:
    classes = Counter(node.name for _, node in nodes() if isinstance(node, ast.ClassDef))
    assert {name: count for name, count in classes.items() if count > 1} == {}
