from conformance.doubles.weights_fixtures import *  # noqa: F403
