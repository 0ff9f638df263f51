"""The table of ``torch.offload.memory_summary()``."""

from typing import Any

_WIDTH = 63
_PURPOSES = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer": "optimizer state",
    "activation": "activations",
    "temporary": "temporary",
}


def _size(count: int | None) -> str:
    if count is None:
        return ""
    for unit in ("B  ", "KiB", "MiB"):
        if count < 768 * 1024:
            return f"{int(count)} {unit}"
        count /= 1024
    return f"{int(count)} GiB" if count >= 10 * 1024 else f"{count:.1f} GiB"


def _count(count: int | None) -> str:
    return "" if count is None else f"{count}   "


def table(stats: dict[str, Any], index: int, budget: int, ring: int) -> str:
    """Lines of a metric, its current value and its peak.

    Args:
        stats: what ``torch.offload.memory_stats()`` returns.
        index: the i of ``offload:i``.
        budget: bytes of ``torch.offload.get_budget()``.
        ring: bytes of ``torch.offload.get_ring_bytes()``.
    """

    def host(name: str, title: str, what: str = "bytes") -> tuple[str, str, str]:
        form = _size if what == "bytes" else _count
        return title, form(stats[f"host.{name}_{what}.current"]), form(stats.get(f"host.{name}_{what}.peak"))

    def device(name: str, title: str) -> tuple[str, str, str]:
        return title, _size(stats[f"device.{name}_bytes.current"]), _size(stats.get(f"device.{name}_bytes.peak"))

    passing = (
        stats["device.slot_bytes.current"] - stats["device.staying_bytes.current"] - stats["device.dirty_bytes.current"]
    )
    groups = [
        [host("allocated", "Host memory allocated")]
        + [host(purpose, f"      {title}") for purpose, title in _PURPOSES.items()],
        [host("reserved", "Host memory reserved"), host("pinned", "      page-locked")],
        [host("allocated", "Storages", "count")]
        + [host(purpose, f"      {title}", "count") for purpose, title in _PURPOSES.items()],
        [
            device("slot", "GPU memory of the cache"),
            device("staying", "      staying"),
            ("      passing", _size(passing), ""),
            device("dirty", "      newer than the host's"),
            device("pinned_slot", "      in use"),
            ("Budget for what stays", _size(budget), ""),
            ("Ring for what passes", _size(ring), ""),
        ],
        [
            ("Fetches", _count(stats["cache.fetches"]), ""),
            ("      found on the GPU", _count(stats["cache.hits"]), ""),
            ("Bytes to the GPU", _size(stats["link.bytes_to_device"]), ""),
            ("Bytes to the host", _size(stats["link.bytes_to_host"]), ""),
        ],
    ]
    lines = [
        "=" * _WIDTH,
        f"{f'offload memory summary, device ID {index}':^{_WIDTH}}",
        "=" * _WIDTH,
        f" {'Metric':^31} | {'Cur Usage':^12} | {'Peak Usage':^12} ",
    ]
    for group in groups:
        lines.append("-" * _WIDTH)
        lines += [f" {title:<31} | {current:>12} | {peak:>12} " for title, current, peak in group]
    return "\n".join([*lines, "=" * _WIDTH])
