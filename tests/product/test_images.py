"""The images' files, as far as they can be read without a daemon that builds them."""

import json
import re
import tomllib
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = ("Dockerfile", "Dockerfile.cuda")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# What compiles; `-dev` and `-devel` are headers and images to compile with.
TOOLS = re.compile(
    r"\b(g\+\+|gcc|clang|build-essential|cmake|ninja|nvcc|setuptools|git)|-dev(el)?\b"
)


@dataclass
class Stage:
    image: str
    name: str | None
    # Instructions in their order, with the defaults of arguments in their places.
    lines: list[tuple[str, str]] = field(default_factory=list)
    arguments: dict[str, str] = field(default_factory=dict)

    def all(self, instruction: str) -> list[str]:
        return [text for name, text in self.lines if name == instruction]


@cache
def stages(file: str) -> tuple[Stage, ...]:
    text = re.sub(r"\\\n\s*", "", (ROOT / file).read_text(encoding="utf-8"))
    outer: dict[str, str] = {}
    found: list[Stage] = []
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        instruction, _, rest = line.partition(" ")
        known = found[-1].arguments if found and instruction != "FROM" else outer
        rest = re.sub(r"\$\{(\w+)\}", lambda match, of=known: of.get(match[1], match[0]), rest)
        if instruction == "FROM":
            image, *name = rest.split(" AS ")
            found.append(Stage(image, name[0] if name else None))
        elif instruction == "ARG":
            known.update([rest.split("=", 1)])
        else:
            found[-1].lines.append((instruction, rest))
    return tuple(found)


@pytest.mark.parametrize("file", FILES)
def test_what_is_copied_exists(file: str) -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    earlier: list[str | None] = []
    copied = 0
    for stage in stages(file):
        for text in stage.all("COPY"):
            *sources, _ = text.split()
            copied += 1
            if sources[0].startswith("--from="):
                assert sources[0].removeprefix("--from=") in earlier
                continue
            for source in sources:
                assert (ROOT / source).exists(), text
                assert not any(fnmatch(source, pattern) for pattern in ignored), text
        earlier.append(stage.name)
    assert copied == 2


@pytest.mark.parametrize("file", FILES)
def test_versions_are_the_projects(file: str) -> None:
    (torch,) = re.findall(
        r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE
    )
    build, last = stages(file)
    for stage in (build, last):
        assert stage.arguments["TORCH"] == torch
        assert f'"{torch}"' in " ".join(stage.all("RUN"))
    installed = " ".join(build.all("RUN"))
    for wanted in PROJECT["build-system"]["requires"]:
        name, _, least = wanted.partition(">=")
        assert re.search(rf"[\s\"]{name}\b", installed), wanted
        if name == "setuptools":
            assert f'"{name}>={least}"' in installed


@pytest.mark.parametrize("file", FILES)
def test_the_last_stage_has_a_command_and_no_build_tools(file: str) -> None:
    build, last = stages(file)
    assert TOOLS.search(" ".join(build.all("RUN")))
    assert not TOOLS.search(" ".join([last.image, *last.all("RUN")]))
    assert last.all("COPY") == ["--from=build /wheels /wheels"]
    assert "rm -r /wheels" in " ".join(last.all("RUN"))
    (entry,) = last.all("ENTRYPOINT")
    (command,) = json.loads(entry)
    assert command in PROJECT["project"]["scripts"]
    (extras,) = re.findall(r"\.whl\)\[([\w,]+)\]", " ".join(last.all("RUN")))
    assert set(extras.split(",")) <= set(PROJECT["project"]["optional-dependencies"])


def test_the_gpus_image_has_one_cuda_and_no_root() -> None:
    build, last = stages("Dockerfile.cuda")
    images = [
        re.fullmatch(r"nvidia/cuda:([\d.]+)-(\w+)-([\w.]+)", each.image)
        for each in stages("Dockerfile.cuda")
    ]
    kinds = [(image[2], image[1], image[3]) for image in images if image]
    assert [kind for kind, *_ in kinds] == ["devel", "base"]
    assert kinds[0][1:] == kinds[1][1:]
    version = kinds[0][1].split(".")[:2]
    assert last.arguments["TORCH_INDEX"].endswith(f"/cu{''.join(version)}")
    # All cards that the project builds for: with less, CMake leaves some out.
    cmake = (ROOT / "cmake" / "cuda.cmake").read_text(encoding="utf-8")
    (least,) = re.findall(r"CMAKE_CUDA_COMPILER_VERSION VERSION_LESS ([\d.]+)", cmake)
    assert [int(part) for part in version] >= [int(part) for part in least.split(".")]
    assert "SPEQ_CUDA=OFF" not in " ".join(build.all("RUN"))
    (user,) = last.all("USER")
    assert f"useradd --create-home {user} " in " ".join(last.all("RUN"))
    assert user != "root"
