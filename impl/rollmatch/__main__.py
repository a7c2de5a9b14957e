"""``python -m rollmatch``, and what torchrun starts as ``-m rollmatch``."""

from rollmatch.cli.main import run

if __name__ == "__main__":
    run()
