from conformance.doubles.data_fixtures import *  # noqa: F403
