"""The reference engine of a replay: blocks, steps, ranks, and the processes in which engines and ranks run."""
