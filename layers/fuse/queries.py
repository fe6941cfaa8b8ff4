"""Attention that no kernel serves, by the function's own equations, in chunks of queries."""

from .program import Equation
from .region import WIDER, Search

LARGEST_SCORES = 2**28
"""Bytes of scores, from which on an attention that no kernel serves is cut along its queries."""


class Queries(Search):
    """The region between the scores of an attention and their product with its values.

    Batch, heads and queries are its rows. The products are those of `jax.checkpoint`.
    """

    of_queries, chunks = True, "chunks of queries"
    what = "attention {rows} rows x {words} keys, heads of {summed}, {dtype}"

    def _is_searched(self, batches: int) -> bool:
        scores = self.program.avals[self.logits]
        return batches > 0 and scores.size * scores.dtype.itemsize > LARGEST_SCORES

    def _is_layer(self, product: Equation, followed: set[int]) -> bool:
        """Tells if a product ends the region: that of weights and values, which are read."""
        self.given |= {*product.ins} - followed
        sizes = [self.program.avals[v].size for v in (*product.outs, self.logits)]
        return WIDER * sizes[0] <= sizes[1]
