"""What a run trains for: how rollouts become segments, what of them is learnt, and how that is measured."""
