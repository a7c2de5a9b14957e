from conformance.doubles.plan_fixtures import *  # noqa: F403
