"""Fails when an include in csrc/ goes against the layers: python -> autograd -> aten -> core -> core/link."""

import re
import sys
from pathlib import Path

CSRC = Path(__file__).resolve().parent.parent / "csrc"

# What each room may include of the others. compat holds the workarounds for PyTorch and knows none but core.
ALLOWED = {
    "core/link": set(),
    "core": {"core/link"},
    "compat": {"core", "core/link"},
    "aten": {"compat", "core", "core/link"},
    "autograd": {"aten", "compat", "core", "core/link"},
    "python": {"autograd", "aten", "compat", "core", "core/link"},
}
# The link is the seam below core, yet both speak of the same errors.
SHARED = {"core/error.h"}
TORCH = re.compile(r"(torch|ATen|c10|caffe2|pybind11)/|Python\.h")


def room(path: str) -> str | None:
    return next((r for r in ALLOWED if path.startswith(r + "/")), None)


def problems(source: Path) -> list[str]:
    name = source.relative_to(CSRC).as_posix()
    own = room(name)
    if own is None:
        return [f"csrc/{name}: lies in no room; the rooms are {', '.join(ALLOWED)}"]
    found = []
    for number, line in enumerate(source.read_text().splitlines(), 1):
        include = re.match(r'\s*#\s*include\s*[<"]([^>"]+)[>"]', line)
        if not include:
            continue
        other = room(include[1])
        if own.startswith("core") and TORCH.match(include[1]):
            found.append(f"csrc/{name}:{number}: core includes {include[1]}, which is PyTorch's")
        elif other not in (None, own, *ALLOWED[own]) and include[1] not in SHARED:
            found.append(f"csrc/{name}:{number}: {own} includes {include[1]}")
    return found


if __name__ == "__main__":
    sources = sorted(p for p in CSRC.rglob("*") if p.suffix in (".h", ".cpp"))
    found = [p for source in sources for p in problems(source)]
    print("\n".join(found) or f"layers: {len(sources)} files, no include against them")
    sys.exit(bool(found))
