"""Attention, without an array of length times length."""

from .attention import attention as attention
from .serving import blocks_pay as blocks_pay
from .serving import served_by as served_by
