"""The table of ``torch.offload.memory_summary()``."""

from typing import Any

_WIDTH = 85
_COLUMNS = ("current", "peak", "allocated", "freed")
_PURPOSES = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer": "optimizer state",
    "activation": "activations",
    "temporary": "temporary",
}


def _size(count: int) -> str:
    for unit in ("B  ", "KiB", "MiB", "GiB", "TiB"):
        if count < 768 * 1024:
            return f"{int(count)} {unit}"
        count /= 1024
    return f"{int(count)} PiB"


def _count(count: int) -> str:
    for unit in ("   ", "K  ", "M  "):
        if count < 750 * 1000:
            return f"{int(count)} {unit}"
        count /= 1000
    return f"{int(count)} G  "


def table(stats: dict[str, Any], index: int, budget: int, ring: int, abbreviated: bool) -> str:
    """Lines of a metric, its current value and its peak, and how much of it has come and gone, as far as each is counted.

    Args:
        stats: what ``torch.offload.memory_stats()`` returns.
        index: the i of ``offload:i``.
        budget: bytes of ``torch.offload.get_budget()``.
        ring: bytes of ``torch.offload.get_ring_bytes()``.
        abbreviated: whether to leave out of what each sum consists.
    """

    def row(title: str, name: str) -> str:
        form = _count if name.endswith("_count") else _size
        values = (stats.get(f"{name}.{column}") for column in _COLUMNS)
        return line(title, *("" if value is None else form(value) for value in values))

    def line(title: str, *cells: str) -> str:
        return f" {title:<27} | " + " | ".join(f"{cell:>11}" for cell in cells) + " "

    def pair(one: str, value: str, other: str, value_of_other: str) -> str:
        return f"  {f'{one}: {value.strip()}':<39} | {f'{other}: {value_of_other.strip()}':<39}  "

    def rows(name: str, title: str, parts: dict[str, str]) -> list[str]:
        return [row(title, name), *(row(f"      {part}", key) for key, part in parts.items() if not abbreviated)]

    groups = [
        rows("host.allocated_bytes", "Host memory allocated", {f"host.{p}_bytes": t for p, t in _PURPOSES.items()}),
        rows("host.reserved_bytes", "Host memory reserved", {"host.pinned_bytes": "page-locked"}),
        [row("Read from files", "host.file_bytes")],
        [row("Shared between processes", "host.shared_bytes")],
        [row("Rings for pageable copies", "host.ring_bytes")],
        rows("host.allocated_count", "Storages", {f"host.{p}_count": t for p, t in _PURPOSES.items()}),
        rows(
            "device.slot_bytes",
            "GPU memory of the cache",
            {
                "device.staying_bytes": "staying",
                "device.passing_bytes": "passing",
                "device.dirty_bytes": "newer than the host's",
                "device.pinned_slot_bytes": "in use",
            },
        ),
    ]
    heading = [
        "=" * _WIDTH,
        f"{f'offload memory summary, device ID {index}':^{_WIDTH}}",
        "-" * _WIDTH,
        pair("Budget for what stays", _size(budget), "Ring for what passes", _size(ring)),
        pair("Fetches", _count(stats["cache.fetches"]), "found on the GPU", _count(stats["cache.hits"])),
        pair("To the GPU", _size(stats["link.bytes_to_device"]), "to the host", _size(stats["link.bytes_to_host"])),
        "=" * _WIDTH,
        line(f"{'Metric':^27}", "Cur Usage ", "Peak Usage ", "Tot Alloc ", "Tot Freed "),
    ]
    body = [text for group in groups for text in ("-" * _WIDTH, *group)]
    return "".join(f"|{text}|\n" for text in [*heading, *body, "=" * _WIDTH])
