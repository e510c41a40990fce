"""Benchmarks: see README.md in this folder for the method."""
