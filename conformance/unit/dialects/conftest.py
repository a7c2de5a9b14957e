from conformance.doubles.dialects_fixtures import *  # noqa: F403
