"""What runs inside vLLM's workers: it joins the group, receives weights beside generation, checks and loads them."""
