"""Checks before anything starts: can this run, and in how much memory and time? Imports no torch."""
