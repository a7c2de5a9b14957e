"""The border: what crosses it, the server's side of it and the workers' side of it."""
