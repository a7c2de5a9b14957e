"""Random faults against learners and servers: ``python -m conformance.campaign --seed S --faults N --real M``."""
