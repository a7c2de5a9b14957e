from conformance.doubles.learn_fixtures import *  # noqa: F403
