"""Attention, without an array of length times length."""

from .attention import attention as attention
