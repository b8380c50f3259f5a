"""Algorithms: how parameters move."""
