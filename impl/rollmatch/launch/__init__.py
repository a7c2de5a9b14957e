"""The doors: what people start."""
