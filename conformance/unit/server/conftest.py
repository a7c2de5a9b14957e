from conformance.doubles.server_fixtures import *  # noqa: F403
