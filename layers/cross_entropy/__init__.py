"""The loss of a linear layer's logits, which are never in memory as a whole."""

from .linear import linear_cross_entropy as linear_cross_entropy
