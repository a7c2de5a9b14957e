from conformance.doubles.rollout_fixtures import *  # noqa: F403
