"""Train a (vision-)language model on its own rollouts.

One step, in ``trainer``::

     samples -> rollout -> target -> learn -> sync -> next step

``records`` names what passes between the packages. A module imports only its own package and those before it in this
order: errors, records, journal, ranks, config, data, model, weights, server, dialects, rollout, learn, objectives,
trainer, report, plan, cli. ``conformance/test_rooms.py`` holds the order.
"""

__version__ = "0.1.0"
