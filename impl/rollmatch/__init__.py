"""Train a (vision-)language model on its own rollouts.

Data goes once around a ring; each room knows what it receives and what it hands on::

       samples
          |
          v    requests, ids
       rollout     a frozen copy of the policy writes one response per sample
          |
          | rollouts
          v
       target      parse strictly, match with the ground truth, append what was missed
          |
          | segments
          v
       learn       pack into rows, mask, loss
          |
          | new weights
          v
       sync        back into the rollout engine, in memory
          |
          +--> next step

``records`` names what is carried from room to room, ``trainer`` walks once around.
A room may import itself and the rooms before it, in this order: errors, records, vocabulary, journal, ranks, config,
samples, template, model, wire, rollout, target, learn, sync, evaluation, objective, step_report, carry, ring, trainer,
report, launch.
``conformance/test_rooms.py`` holds the order.
"""

__version__ = "0.1.0"
