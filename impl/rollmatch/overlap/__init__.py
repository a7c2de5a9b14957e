"""Learning while rollouts are made: what is asked for when, what is learnt before all is there, the time it saves."""
