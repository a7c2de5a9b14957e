"""Carries a trial's fault into the processes that its tests start: Python imports this module before anything else."""

import os
import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[4])
FAULT_VARIABLE = "ROLLMATCH_FAULT"

if fault_id := os.environ.get(FAULT_VARIABLE):
    sys.path.insert(0, ROOT)
    from conformance.harness.faults.bank import BANK
    from conformance.harness.faults.importer import install

    install(BANK[fault_id].change_of)
    sys.path.remove(ROOT)
