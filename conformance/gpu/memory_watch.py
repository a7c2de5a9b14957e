"""How much of each GPU's memory is in use, looked at while something runs."""

import subprocess
import time
from threading import Event, Thread

ASK = ("nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits")
EVERY_S = 0.25


class MemoryWatch:
    """``samples``: (time, MiB in use by GPU); none where there are no GPUs."""

    def __enter__(self):
        self.samples, self.total_mib, self._end = [], [], Event()
        self._thread = Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._end.set()
        self._thread.join()

    @property
    def most_mib(self):
        """By GPU."""
        return list(map(max, zip(*(used for _, used in self.samples), strict=True)))

    def shares(self, gpu=0):
        """(time, share of the GPU's memory)."""
        return [(at, used[gpu] / self.total_mib[gpu]) for at, used in self.samples]

    def _look(self):
        while not self._end.wait(EVERY_S):
            try:
                text = subprocess.run(ASK, capture_output=True, text=True, check=True).stdout
            except FileNotFoundError:
                return
            used, self.total_mib = read(text)
            self.samples.append((time.time(), used))


def read(text):
    """What nvidia-smi prints, line by line.

    >>> read("10, 100\\n20, 200\\n")
    ([10, 20], [100, 200])
    """
    lines = [list(map(int, line.split(","))) for line in text.splitlines()]
    return [used for used, _ in lines], [total for _, total in lines]
