"""Measurements on GPUs; `collectives.py` is the one to run, the rest are its parts."""
