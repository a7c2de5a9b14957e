"""Reports of a run: lines on the console while it trains, and one offline page.

Both read the journal's events and nothing else, so that a page can be made on any machine that has the run directory.
"""

from rollmatch.report.console import StepConsole, print_before_after, print_header
from rollmatch.report.page import write_page

__all__ = ["StepConsole", "print_before_after", "print_header", "write_page"]
