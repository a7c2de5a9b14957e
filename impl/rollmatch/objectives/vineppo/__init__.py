"""VinePPO: each step of a response is judged by fresh continuations from the states before and after it.

Rollouts become trajectories, splitters cut these into steps, values of the states between steps come from continuations
(or from siblings, or from a search tree), and a step's advantage is its reward plus the value after it minus the value
before it. Sources: Kazemnejad et al., arXiv 2410.01679 (VinePPO); Guo et al., arXiv 2505.23564 (cut points).
"""
