"""A bar on the error output: tqdm's where that is installed, a line that is written over where not."""

import contextlib
import sys
import time
from typing import Any


def _is_terminal(stream: Any) -> bool:
    """Not every program's error output can tell, or is open."""
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False


class Progress(contextlib.AbstractContextManager):
    """Counts bytes up to a total.

    Args:
        total: bytes in all; of none nothing is shown.
        shown: whether to show anything; None: where the error output is a terminal.
    """

    def __init__(self, total: int, shown: bool | None) -> None:
        terminal = _is_terminal(sys.stderr)
        self._shown = total > 0 and sys.stderr is not None and (terminal if shown is None else shown)
        self._total = total
        self._done = 0
        self._begin = time.perf_counter()
        self._end = "\r" if terminal else ""
        self._bar: Any = None
        if self._shown:
            with contextlib.suppress(ImportError):
                from tqdm import tqdm

                self._bar = tqdm(total=total, unit="B", unit_scale=True, desc="load", file=sys.stderr)

    def add(self, count: int) -> None:
        """Counts bytes that have been read."""
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
        elif self._shown and self._end:
            sys.stderr.write(self._line() + self._end)
            sys.stderr.flush()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._shown:
            sys.stderr.write(self._line() + "\n")

    def _line(self) -> str:
        seconds = max(time.perf_counter() - self._begin, 1e-9)
        done, total, rate = (value / 2**30 for value in (self._done, self._total, self._done / seconds))
        return f"load: {done:.2f} of {total:.2f} GiB, {rate:.1f} GiB/s"
