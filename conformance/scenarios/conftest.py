"""Fixtures that scenarios share."""

from conformance.doubles.data_fixtures import *  # noqa: F403
from conformance.doubles.dialects_fixtures import *  # noqa: F403
from conformance.doubles.learn_fixtures import *  # noqa: F403
from conformance.doubles.plan_fixtures import *  # noqa: F403
from conformance.doubles.rollout_fixtures import *  # noqa: F403
from conformance.doubles.server_fixtures import *  # noqa: F403
from conformance.doubles.weights_fixtures import *  # noqa: F403
