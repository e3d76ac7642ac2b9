"""Copies between a CUDA device and rows, through the driver's own functions."""
