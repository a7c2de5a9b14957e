"""The living matrix: which scenario holds for which subject, on one offline page."""
