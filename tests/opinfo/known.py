"""The differences that are known, from known_differences.toml."""

from dataclasses import dataclass
from pathlib import Path

import tomllib
import torch
from entry import MODES, WHATS
from helpers import GPU
from packaging.specifiers import SpecifierSet
from packaging.version import Version

FILE = Path(__file__).with_name("known_differences.toml")
KEYS = {"entries", "modes", "what", "reason", "torch", "on", "unsteady"}


@dataclass(frozen=True)
class Known:
    entry: str
    mode: str
    what: str
    reason: str
    unsteady: bool  # fails in some runs only


def load(file: Path = FILE, version: str = torch.__version__, gpu: bool = GPU) -> list[Known]:
    """Those for this torch (``torch``: a version specifier) and this machine (``on``: cpu or cuda)."""
    release = Version(version).base_version
    found = []
    for group in tomllib.loads(file.read_text())["difference"]:
        if set(group) - KEYS or not set(group["modes"]) <= set(MODES) or not set(group["what"]) <= set(WHATS):
            raise ValueError(f"{file.name}: unknown key, mode or what in {group}")
        if not group["reason"].strip():
            raise ValueError(f"{file.name}: no reason in {group}")
        if not SpecifierSet(group.get("torch", "")).contains(release) or group.get("on") == ("cpu" if gpu else "cuda"):
            continue
        found += [
            Known(entry, mode, what, group["reason"], group.get("unsteady", False))
            for entry in group["entries"]
            for mode in group["modes"]
            for what in group["what"]
        ]
    return found


def judge(name: str, answer: dict, known: list[Known], whole: bool) -> list[str]:
    """What is wrong with an entry's answer: failures that aren't known, and, of a whole run, known ones that passed."""
    mine = {f"{k.mode} {k.what}": k for k in known if k.entry == name}
    wrong = [f"{what}: {reason}" for what, reason in answer["failures"].items() if what not in mine]
    if answer["error"]:
        wrong.append(answer["error"])
    if whole:
        wrong += [
            f"{what}: passes; take it out of {FILE.name}"
            for what, k in mine.items()
            if what not in answer["failures"] and not k.unsteady
        ]
    return wrong
