"""What forked commands find done: the digits' processor is read, with which transformers loads 200 modules."""

from conformance.rollout.digits import template_of

template_of()
