"""`fuse`: fused operations put into a traced program, whoever wrote it."""

from .fuse import fuse as fuse
from .sites import Report as Report
from .sites import Row as Row
