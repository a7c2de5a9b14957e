"""Which functions of ``impl/`` a process runs through, by a profile function."""

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

HOOK = "from conformance.harness.watch import Watch; Watch().start({folder!r})"
"""``sitecustomize.py`` of processes that are watched."""


class Watch:
    """Which functions of ours (``file:name``) the process runs through, and when it last did."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}

    def start(self, folder: str | None = None) -> None:
        """Watch all threads; with a folder, write what was seen there every 100 ms."""
        threading.setprofile(self._called)
        sys.setprofile(self._called)
        if folder:
            self._write_beside(Path(folder))
            os.register_at_fork(after_in_child=lambda: self._write_beside(Path(folder)))

    def stop(self) -> set[str]:
        sys.setprofile(None)
        threading.setprofile(None)
        return set(self.last)

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and "/impl/rollmatch/" in name and frame.f_code.co_name != "<module>":
            self.last[f"{name.rpartition('/impl/rollmatch/')[2]}:{frame.f_code.co_qualname}"] = time.time()

    def _write_beside(self, folder: Path) -> None:
        threading.Thread(target=self._write, args=(folder,), daemon=True).start()

    def _write(self, folder: Path) -> None:
        path = folder / f"{os.getpid()}.json"
        while True:
            path.with_suffix(".tmp").write_text(json.dumps(self.last.copy()))
            path.with_suffix(".tmp").rename(path)
            time.sleep(0.1)
