"""`benchmarks/foreign_steps.py` with a toy in the place of its models."""

import importlib
import pathlib
import sys

from flax import nnx

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"


def toy(steps, norm=True):
    """A case of the benchmark `steps`: an embedding, norms where asked for, and a product."""

    def make(layers, vocabulary):
        rngs = nnx.Rngs(0)
        norms = [nnx.RMSNorm(32, rngs=rngs)] if norm else []
        linear = nnx.Linear(32, vocabulary, use_bias=False, rngs=rngs)
        model = nnx.Sequential(nnx.Embed(vocabulary, 32, rngs=rngs), *norms * layers, linear)
        return steps.Model(model, lambda model, tokens: model(tokens), steps.TOKENS)

    return steps.Case(make, "layers", "vocabulary")


if __name__ == "__main__":
    sys.path.insert(0, str(BENCHMARKS))
    benchmark = importlib.import_module("foreign_steps")
    benchmark.MODELS = {"toy": toy(benchmark)}
    benchmark.main()
