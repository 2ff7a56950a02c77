"""Reports of runs, from what they wrote to their folders: comparisons, HTML pages, Markdown. Needs no torch."""
