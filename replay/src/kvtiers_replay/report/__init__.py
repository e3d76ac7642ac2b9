"""The report of a replay: the summary of what the engines measured, its text for a terminal, and its page."""
