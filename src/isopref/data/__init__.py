"""Reading preference data and cutting it into rows."""
