"""Rows to the ranks of their experts, and back.

simulate   what it means: the oracle of the kernels
"""
