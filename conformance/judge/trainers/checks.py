"""What a trainer owes a rollout server, judged by what arrives there: all checks, in the order in which they run."""

from conformance.judge.servers.check import MUST, SHOULD, Check
from conformance.judge.trainers import disturbed, undisturbed
from conformance.judge.trainers.registry import REGISTERED

_MODULES = [undisturbed.__name__, disturbed.__name__]
CHECKS: tuple[Check, ...] = tuple(sorted(REGISTERED, key=lambda each: _MODULES.index(each.judge.__module__)))
BY_ID = {each.check_id: each for each in CHECKS}
assert len(BY_ID) == len(CHECKS)
assert all(required in BY_ID for each in CHECKS for required in each.requires)
assert {each.grade for each in CHECKS} == {MUST, SHOULD}
