from conformance.doubles.dialects_fixtures import *  # noqa: F403
from conformance.doubles.weights_fixtures import *  # noqa: F403
