"""Modules that replace routed experts, dense layers and the embedding."""
