"""One call beside learning, once it was answered. Needs no torch."""

from dataclasses import dataclass

from rollmatch.rollout.lot import Lot


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call that was answered; times are unix seconds."""

    lot: Lot
    began: float
    ended: float
    policy_version: int
    num_tokens: int

    def as_list(self) -> list[float]:
        """For the journal: server, begin, end, optimizer step, first request and the one after the last."""
        lot = self.lot
        return [lot.server_index, round(self.began, 3), round(self.ended, 3), lot.step, lot.start, lot.stop]
