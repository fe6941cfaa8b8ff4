"""Element-wise operations from C++ source, compiled when they are first used."""

from .elementwise import Elementwise as Elementwise
from .elementwise import elementwise as elementwise
