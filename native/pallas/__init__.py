"""Pallas kernels: Mosaic on TPUs, interpreted on CPUs.

Nothing here is imported before a program is lowered that uses it.
"""
