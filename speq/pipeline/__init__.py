"""Pipeline parallelism: one model's layers in stages on several machines.

Stage N has rank N - 1. Rank 0 is the first stage, which samples tokens.
"""
