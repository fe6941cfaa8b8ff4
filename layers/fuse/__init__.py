"""`fuse`: fused operations put into a traced program, whoever wrote it."""

from .fuse import fuse as fuse
from .report import Report as Report
from .report import Row as Row
