"""Drive the whole stack from a recorded or generated trace, and check every byte."""
