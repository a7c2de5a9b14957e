"""A slow oracle: whole runs computed naively, from the specification and the papers; it knows no product."""
