"""Files of /proc and of control groups, as the kernel shows them."""

from pathlib import Path


class Kernel:
    """/proc, and hierarchies of groups mounted below `root`."""

    def __init__(self, root: Path) -> None:
        self.root, self.proc = root, root / "proc"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "self/cgroup").touch()
        (self.proc / "self/mountinfo").touch()
        (self.proc / "meminfo").write_text(
            f"MemTotal: {64 << 20} kB\nMemFree: 9 kB\nMemAvailable: {32 << 20} kB\n"
        )

    def mount(self, name: str, kind: str, options: str = "rw", root: str = "/") -> Path:
        at = self.root / name
        at.mkdir()
        with open(self.proc / "self/mountinfo", "a") as file:
            shown = str(at).replace(" ", "\\040")
            # With an optional field, of which there may be any number before the hyphen.
            file.write(f"31 23 0:28 {root} {shown} rw,nosuid shared:9 - {kind} {kind} {options}\n")
        return at

    def belongs(self, *lines: str) -> None:
        (self.proc / "self/cgroup").write_text("".join(f"{line}\n" for line in lines))


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")
