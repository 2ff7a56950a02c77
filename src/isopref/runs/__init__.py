"""The format of a run's folder: written by build, read by report and cli."""
