"""What the product is judged by, from definitions: numpy in double precision, a plain loop before
a fast one. Nothing here imports `speq`; `test_imports.py` checks it.
"""
