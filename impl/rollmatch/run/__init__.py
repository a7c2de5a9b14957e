"""From a YAML to parts, and from parts to a finished run in its directory."""
