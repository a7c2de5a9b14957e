"""One rank of small runs beside servers in its process, one run per mode: ``overlap_worker.py FOLDER OVERRIDE...``"""

import json
import sys
import time
from pathlib import Path

from safetensors.torch import save_file

from conformance.trainer.overlapped import overlapped
from conformance.trainer.small_run import weights_of
from rollmatch.rollout.retry import ServerRestarted

RESTARTED = "-restarted"
"""Of a run in which a server is restarted under rank 1 in the middle of each step."""
MODES = ("off", "stream", "ahead", f"off{RESTARTED}", f"stream{RESTARTED}", f"ahead{RESTARTED}")


def run(folder: Path, mode: str, *overrides: str) -> None:
    """Writes weights and losses."""

    trainer, servers = overlapped(folder / mode, mode.removesuffix(RESTARTED), *overrides, is_shallow=True)
    rank = trainer.source.ranks.rank

    def before_call(server: int, ids: list[int]) -> None:
        if mode.endswith(RESTARTED) and rank == 1 and servers.policy_version % 2:  # the first version of each step
            servers.is_well = lambda: False
            raise ServerRestarted("was restarted")
        # The ranks' parts come back at different times: rank 1 waits for its last one.
        time.sleep(0.4 if rank and ids == trainer.last else 0.0)

    servers.before_call = before_call
    window = trainer.plan.at(0)
    trainer.last = [trainer.train_dataset[window.sample_indices[-1]].sample_id]
    trainer.train()
    save_file(weights_of(trainer.model), folder / f"{mode}-rank{rank}.safetensors")
    log = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    (folder / f"{mode}-rank{rank}.json").write_text(json.dumps(log))


if __name__ == "__main__":
    for mode in MODES:
        run(Path(sys.argv[1]), mode, *sys.argv[2:])
