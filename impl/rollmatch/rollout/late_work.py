"""Which call a server begins next: its own share in order, or what another one has not got to. Needs no torch."""

from collections import deque
from collections.abc import Sequence

from rollmatch.rollout.lot import Lot


def next_lot(queues: Sequence[deque[Lot]], server_index: int, *, moves: bool) -> Lot | None:
    """The lot that a server is to be asked for, which stays where it is; None where there is none for it.

    The earliest step comes first, since the learner waits for it; of that step the server's own lots, from their
    beginning; else, where work ``moves``, the last lot of the server that has most requests of it waiting.

    >>> slow, idle = deque([Lot(0, 0, 2, 4), Lot(0, 0, 4, 6), Lot(1, 0, 0, 6)]), deque([Lot(1, 1, 6, 12)])
    >>> next_lot([slow, idle], 1, moves=True), next_lot([slow, idle], 1, moves=False)
    (Lot(step=0, server_index=0, start=4, stop=6), Lot(step=1, server_index=1, start=6, stop=12))
    """
    own = queues[server_index]
    if not moves:
        return own[0] if own else None
    waiting = [lot for queue in queues for lot in queue]
    step = min((lot.step for lot in waiting), default=0)
    mine = [lot for lot in own if lot.step == step]
    if mine or not waiting:
        return mine[0] if mine else None
    return max(([lot for lot in queue if lot.step == step] for queue in queues), key=_num_requests)[-1]


def _num_requests(lots: Sequence[Lot]) -> int:
    return sum(lot.stop - lot.start for lot in lots)
