"""The index of a model in several files, and JSON from files that may be damaged."""

import json
import os
from pathlib import Path
from typing import Any


def read_index(path: Path) -> dict[str, Path]:
    """Which file each tensor is in, by an index of shards: files in the index's own directory.

    Raises:
        ValueError: where it isn't such an index, or names a file elsewhere.
    """
    try:
        index = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not a valid index of shards: it is {error}.") from None
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not all(isinstance(value, str) for value in names.values()):
        raise ValueError(f'{path} is not a valid index of shards: it has no "weight_map" of strings.')
    for name, shard in names.items():
        if shard in ("", ".", "..") or "\0" in shard or os.path.basename(shard) != shard:
            raise ValueError(f"{path} says that tensor {name!r} is in {shard!r}, which is no file beside it.")
    return {name: path.parent / shard for name, shard in names.items()}


def parse_json(text: bytes) -> Any:
    """JSON in UTF-8 without a key twice; a ValueError says what it is instead."""
    try:
        return json.loads(text.decode(), object_pairs_hook=_unique, parse_int=_integer)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at character {error.pos})") from None
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None


def _integer(digits: str) -> int | str:
    # Python refuses thousands of digits; no number of a header has more than these.
    return int(digits) if len(digits) <= 20 else digits


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"JSON with the key {twice!r} twice in one object")
    return result
