"""The replay companion: drives the whole stack from a recorded or generated trace, and checks every byte."""
