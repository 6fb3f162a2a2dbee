"""Schedules experts' transfers: which experts a device holds, and which are loaded next.

Imports no model.
"""
