"""Kernels as torch ops: schemas, checks, the native library, and the readable reference."""
