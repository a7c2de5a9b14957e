"""VinePPO's continuations with the engine's prefix cache, and the same requests without it.

Bars on a CPU, for nine continuations of one long state: prefill computed at most 1.05 times the unique tokens, and at
least 3 times as fast as without the cache. Nested states miss the first bar (1.197), and no order of requests helps:
the engine shares whole blocks only, so that each request computes again what its last block holds. What that comes to
is known beforehand, and nothing is computed beyond it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from rollmatch.run.machine import ENVIRONMENT, cpu_environment

ROOT = Path(__file__).parents[2]
MOST_RECOMPUTED, LEAST_SPEEDUP = 1.05, 3.0


def measure(caching):
    script = ROOT / "benchmarks/rollout/prefix_engine.py"
    done = subprocess.run(
        [sys.executable, str(script), caching],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
        env=os.environ | ENVIRONMENT | cpu_environment(eager=True) | {"PYTHONPATH": f"{ROOT}/impl:{ROOT}"},
    )
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))[len("RESULT") :])


def test_nine_continuations_cost_one_prefill(benchmark, check_bar):
    figures = benchmark.pedantic(lambda: {caching: measure(caching) for caching in ("on", "off")}, rounds=1)
    on, off = figures["on"], figures["off"]
    benchmark.extra_info |= figures
    benchmark.extra_info |= {
        f"{name}: {what}": round(value, 3)
        for name in ("one state", "all states")
        for what, value in (
            ("prefill over unique", on[f"{name}: computed"] / on[f"{name}: unique"]),
            ("speedup", off[name] / on[name]),
        )
    }
    for name in ("one state", "all states"):
        assert on[f"{name}: computed"] == on[f"{name}: least"]
    assert benchmark.extra_info["one state: prefill over unique"] <= MOST_RECOMPUTED
    for name in ("one state", "all states"):
        speedup = benchmark.extra_info[f"{name}: speedup"]
        check_bar(f"prefix cache, {name}: {speedup:.2f} x without (bar {LEAST_SPEEDUP})", speedup >= LEAST_SPEEDUP)
