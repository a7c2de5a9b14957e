"""Random faults against learners and servers: ``python -m conformance.tools.campaign --seed S --faults N --real M``."""
