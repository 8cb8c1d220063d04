"""Benchmarks: each compares with a baseline of the same run, and writes records of one form."""
