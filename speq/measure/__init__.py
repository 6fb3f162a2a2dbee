"""Measurements of a model on a machine: tune, check, the link, routes, reports."""
