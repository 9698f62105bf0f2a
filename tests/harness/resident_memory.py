"""What this process has resident: pages of its own, and of shared ones its share."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType


def proportional_bytes(process: int | str = "self") -> int:
    """The proportional set size of a process, this one or one by its id: a page that n processes map counts 1/n."""
    return int(Path(f"/proc/{process}/smaps_rollup").read_text().split("Pss:")[1].split()[0]) << 10


class ResidentPeak:
    """Inside, a thread looks at what is resident, as often as it can at a thousandth of a second between.

    Attributes:
        before: bytes when the context began.
        most: most bytes that were seen.
    """

    def __init__(self) -> None:
        self.before = self.most = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="deepspeed-resident", daemon=True)

    @property
    def growth(self) -> int:
        """Bytes that came on top."""
        return self.most - self.before

    def __enter__(self) -> ResidentPeak:
        self.before = self.most = proportional_bytes()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.001):
            self.most = max(self.most, proportional_bytes())
