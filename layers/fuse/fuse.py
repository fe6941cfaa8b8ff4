"""`fuse`: one line that puts fused operations into anybody's function, proved by its equations."""

import collections
import difflib
import functools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from ..core.arguments import Quantization, check_quantization
from . import attention, indexing, losses, norms, products, search
from .activations import READ as ACTIVATIONS
from .activations import Activations
from .call import Call
from .codes import with_codes
from .program import Program
from .scores import RULES as SCORES
from .scores import ScoreForms
from .sites import Report, Row, Site, Theirs, explained, of_equations

Function = TypeVar("Function", bound=Callable[..., Any])
Skip = str | Iterable[str] | Callable[[Row], bool]
DOMAINS = "attention", "loss", "norm", "mlp", "product", "indexing", "lookup", "codes"


def fuse(
    function: Function,
    *,
    quantization: Quantization = None,
    skip: Skip = (),
    report: Callable[[Report], Any] | None = None,
    require: str | Iterable[str] = (),
) -> Function:
    """Returns `function` with what its program computes slowly computed by fused operations.

    The function is traced when it is called. From the equations, whatever wrote them, it is proved
    what is attention, or the loss of a linear layer; that is replaced, and the rest is evaluated as
    it was. Names of classes, functions and parameters play no part. What is not proved stays.

    Fuse the loss that you differentiate: a function that takes gradients itself is left as it is
    there. Any transformation may be applied to the new function. Every call traces it, so call it
    within `jax.jit`. For functions of nnx models there is `normfuse.layers.nnx.fuse`, which also
    keeps what a call changes in them.

    How a value reaches the function does not matter: an array that it closes over is data, as an
    argument is, and a tree of arrays that it closes over may hold parameters. What a call writes
    into Python objects is there afterwards, also where it raises an error.

    Args:
      function: of pytrees of arrays, Equinox and Linen models among them; what else there is in
        them is static. Dictionaries and lists in its arguments are its own copies. Objects there
        must not change, unless it returns the changes.
      quantization: "fp8" for products of FP8 operands (docs/quantization.md).
      skip: what stays as it is: a word or several, found in the named scopes and lines of the
        report's rows; or a function of a row.
      report: is called with a `Report` whenever the function is traced; `print` shows the table.
      require: a domain or several that must be served, as ("attention", "loss"): it is an error
        where none is found, or one is left that `skip` does not name.

    Returns:
      A function of the same arguments. Results differ from those of `function` by rounding. What
      overflows on the way in `function` alone may stay finite, as float64 has it. A number of -1e4
      or less that is written into scores of attention, or added to them, masks them: other scores
      must be above it.

    Raises:
      TypeError: if function or report cannot be called, for a skip that is no word and no function,
        and, when it is called, for a function that runs only later (a generator, an async one).
      ValueError: for an unknown quantization or domain, where `require` is not met, and before
        anything runs, if the function changes objects in its arguments, as nnx modules change their
        state, or lets an object keep an array where it cannot be replaced, such as a generator.

    Warns:
      UserWarning: where nothing was replaced and `report` is None, and for a `skip` that is not
        found.

    >>> import jax, jax.numpy as jnp
    >>> from normfuse import fuse
    >>> def loss(x, kernel, labels):
    ...     log_p = jax.nn.log_softmax(x @ kernel)
    ...     return -jnp.mean(jnp.take_along_axis(log_p, labels[:, None], 1))
    >>> served = lambda report: print(report.fused[0].served)
    >>> x, kernel, labels = jnp.ones((4, 8)), jnp.ones((8, 2048)), jnp.arange(4)
    >>> value, gradient = jax.value_and_grad(fuse(loss, report=served))(x, kernel, labels)
    linear_cross_entropy: sum
    """
    options = options_of("fuse", function, quantization, skip, report, require)
    if isinstance(function, functools.partial):
        inner = fuse(function.func, **options._asdict())
        return functools.partial(inner, *function.args, **function.keywords)  # pyright: ignore

    @functools.wraps(function)
    def fused(*args: Any, **kwargs: Any) -> Any:
        call = Call(function, args, kwargs)
        try:
            program = rewritten(call, options, function)
            if program is not None:
                run = jaxpr_as_fun(program)
                # It checks no equation for NaN, since parts such as jnp.var do without checks.
                run = jax.jit(run) if jax.config.jax_debug_nans else run  # pyright: ignore
                return call.whole(run(*call.arrays))
        except BaseException:
            call.leave()
            raise
        call.leave()
        return function(*args, **kwargs)

    return marked(fused)  # pyright: ignore[reportReturnType]


class Options(NamedTuple):
    """The checked options of `fuse`."""

    quantization: Quantization
    skip: Any
    report: Callable[[Report], Any] | None
    require: tuple[str, ...]


def options_of(
    op: str, function: Any, quantization: Any, skip: Any, report: Any = None, require: Any = ()
) -> Options:
    """Returns the options of `fuse`; raises an error for those that cannot be."""
    check(op, function, quantization, report)
    require = (require,) if isinstance(require, str) or not np.iterable(require) else tuple(require)
    for name in require:
        if name not in DOMAINS:
            raise ValueError(
                f"{op}: require must name domains, got {name!r}{_nearest(name, DOMAINS)}; there "
                f"are {', '.join(DOMAINS)}"
            )
    return Options(quantization, skip_of(op, skip), report, require)


def _nearest(word: Any, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(word), [*names], 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def marked(fused: Any) -> Any:
    """Marks a function as fused; `functools.wraps`, as in `jax.jit`, passes that on."""
    vars(fused)["fused_by_normfuse"] = True
    return fused


def check(op: str, function: Any, quantization: Any, report: Any) -> None:
    """Raises an error for arguments of `fuse` that cannot be."""
    for name, value in (("function", function), ("report", report)):
        if not callable(value) and (name == "function" or value is not None):
            raise TypeError(f"{op}: {name} must be a function, got {value!r}")
    check_quantization(op, quantization)


def skip_of(op: str, skip: Any) -> Any:
    """Returns the words of a `skip`, or its function; TypeError for anything else."""
    if callable(skip):
        return skip
    words = (skip,) if isinstance(skip, str) else tuple(skip) if np.iterable(skip) else (skip,)
    if not all(isinstance(word, str) for word in words):
        raise TypeError(
            f"{op}: skip must be a word, several words or a function of a row, got {skip!r}; () "
            "skips nothing"
        )
    return words


def rewritten(call: Call, options: Options, function: Any) -> Any:
    """Returns the program of a call, with what is found in it replaced; nothing has run yet.

    Whatever fails on the way, it is the function's own; None if that has to be called again.
    """
    rows, codes, program = [], [], call.program
    if call.is_lost:
        conclude([], [Row(_name(function), "program", "", _IN_RULES)], function, options)
        return None
    trace = lambda run: jax.make_jaxpr(run)(call.arrays)
    try:
        of_arrays, names = call.origins()
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            graph = Program(program, origins=of_arrays, names=names)
            rows = plan(graph, options.quantization, options.skip)
            if any(site is not None for site, _ in rows):
                program = trace(graph.run)
            if options.quantization is not None:  # norms write the codes that products read
                run, codes = with_codes(program)
                program = trace(run) if any(row.served for row in codes) else program
    except Theirs as failure:
        (error,) = failure.args
        raise error from error.__cause__
    except Exception as error:
        why = explained(error)
        for site, _ in rows:
            if site is not None:
                site.failed = why
        codes = [Row(_name(function), "program", "", _UNREAD + why)]
    conclude(rows, codes, function, options)
    return program


# ---------------------------------------------------------------- replacing


GRADIENT = "the function takes its gradient itself: fuse the loss that you differentiate"
SKIPPED = "skip names it"
_IN_RULES = "a derivative of its own (custom_jvp, custom_vjp) closes over what it computes"
Planned = list[tuple[Site | None, Row]]


def plan(program: Program, quantization: Quantization, skip: Skip) -> Planned:
    """Chooses the sites of a program and of the bodies within it; returns the report's rows."""
    return [row for g in program.all_programs() for row in _planned(g, quantization, skip)]


def _planned(each: Program, quantization: Quantization, skip: Skip) -> Planned:
    """Chooses the sites of one program."""
    rows: Planned = []
    sites, left = _found(each, quantization)
    kept = []
    scopes = {id(e.scope): e.scope for e in each.equations}  # few, and each takes long to write
    inside = any("transpose(" in str(scope) for scope in scopes.values())
    row_of = functools.cache(
        lambda site: Row(each.line(site.outs[0]), site.what + each.within, site.served)
    )
    for site in sites:
        if inside and "jvp(" in str(each.maker[site.outs[0]].scope):
            left.append((site.outs[0], site.what, GRADIENT, site.dead))
        elif skip and _skipped(skip, row_of(site)):
            left.append((site.outs[0], site.what, SKIPPED, site.dead))
        else:
            kept.append(site)
    _choose(each, kept, left)
    live = each.needed(each.results, {}, each.sites)
    for site in dict.fromkeys(each.sites.values()):
        rows.append((site, row_of(site)))
    told = set()
    for value, what, why, dead in left:
        unread = why.startswith(_UNREAD)
        if value in each.sites and not unread:
            continue  # something else serves it
        # The product of a loss that is left has a row of its own: why it is not in FP8.
        key = dead or value, what == "product"
        if (unread or value in live or any(d in live for d in dead)) and key not in told:
            told.add(key)
            rows.append((None, Row(each.line(value), what + each.within, "", why)))
    return rows


_DOMAINS = "attention", "loss", "norm", "indexing", "lookup", "mlp"  # in the order of reports
_UNREAD = "it could not be read: "


def _unread(error: Exception) -> str:
    is_symbolic = isinstance(error, jax.errors.InconclusiveDimensionOperation)
    return "its sizes are not known" if is_symbolic else _UNREAD + explained(error)


class _Values(NamedTuple):
    """The values of a program, as the domains read them."""

    program: Program
    quantization: Quantization
    scores: ScoreForms
    parts: norms.Norms
    activations: Activations


_FIND: dict[str, Callable[[_Values], Iterable[Any]]] = {  # in the order in which they are searched
    "norm": lambda of: norms.found(of.parts),
    "attention": lambda of: attention.found(of.scores),
    "loss": lambda of: losses.found(of.scores, quantization=of.quantization),
    "indexing": lambda of: of_equations(of.program, indexing.site_of, "gather", "scatter"),
    "lookup": lambda of: of_equations(of.program, indexing.lookup_of, "gather"),
    "mlp": lambda of: products.found(
        products.Products(of.program, of.scores, of.activations, of.scores.made), of.quantization
    ),
}


def _found(program: Program, quantization: Quantization) -> tuple[list[Site], list[Any]]:
    """Returns the sites that were found, and (value, what, why, what it needs dead) of others."""
    sites: dict[str, list[Site]] = {name: [] for name in _DOMAINS}
    left: list[Any] = []
    of = _Values(
        program, quantization, ScoreForms(program), norms.Norms(program), Activations(program)
    )
    _read(of, left)
    made_of = {"attention": of.scores.made_of, "loss": of.scores.made_of, "norm": of.parts.made_of}
    for name, find in _FIND.items():
        for one in _tried(program, name, lambda find=find: find(of), left):
            if isinstance(one, Site):
                sites[name].append(one)
            else:
                value, why = one
                dead = made_of[name](value) if name in made_of else (value,)
                left.append((value, "product" if name == "mlp" else name, why, dead))
        # Results of sites are read as they are, by attention and losses, too: what a norm rounds to
        # its result would keep the norm's own equations alive.
        of.scores.made.update(v for site in sites[name] for v in site.outs)
        of.scores.wanted.update(v for site in sites[name] for v in site.reads)
    sites["loss"], left = _with_regions(program, sites, left, quantization)
    return sum(sites.values(), []), left


def _read(of: _Values, left: list[Any]) -> None:
    """Reads the equations of floats in their order; what cannot be read is left."""
    read = (of.scores, SCORES), (of.parts, norms.RULES), (of.activations, ACTIVATIONS)
    for equation in of.program.equations:
        first = of.program.avals[equation.outs[0]] if len(equation.outs) == 1 else None
        if first is None or not jnp.issubdtype(first.dtype, jnp.floating):
            continue
        for domain, names in read:
            try:
                if equation.name in names:
                    domain.read(equation)
            except Exception as error:
                left.append((equation.outs[0], "program", _unread(error), ()))


def _tried(
    program: Program, name: str, find: Callable[[], Iterable[Any]], left: list[Any]
) -> Iterator[Any]:
    """Yields what a search finds; one row says where it failed."""
    try:
        yield from find()
    except Exception as error:
        last = [v for equation in program.equations for v in equation.outs][-1:]
        left += [(v, name, _unread(error), ()) for v in last]


def _with_regions(
    program: Program, sites: Mapping[str, list[Site]], left: list[Any], quantization: Quantization
) -> tuple[list[Site], list[Any]]:
    """Returns the losses, and what is left, with those that are computed in chunks of rows.

    These are losses whose logits are alive beside all other sites, and take the place of what else
    needs the same logits.
    """
    taken = {name: {v: s for s in some for v in s.outs} for name, some in sites.items()}
    needed = lambda names: program.needed(
        program.results, {}, {v: s for n in names for v, s in taken[n].items()}
    )
    find = lambda: search.found(
        program, needed(taken.keys() - {"loss"}), needed(taken), quantization
    )
    found = [*_tried(program, "loss", find, left)]
    regions = [one for one in found if isinstance(one, Site)]
    lost = {v for site in regions for v in site.dead}
    left = [one for one in left if one[1] not in ("loss", "attention") or not lost & {*one[3]}]
    of_losses = [*[site.dead for site in sites["loss"]], *[d for _, k, _, d in left if k == "loss"]]
    known = {v for dead in of_losses for v in dead}  # these have a row that says why
    others = [one for one in found if not isinstance(one, Site) and one[0] not in known]
    left += [(value, "loss", why, (value,)) for value, why in others]
    return [s for s in sites["loss"] if not lost & {*s.dead}] + regions, left


def _choose(program: Program, sites: list[Site], left: list[Any]) -> None:
    """Keeps the sites that are read, and after which nothing reads what they make needless."""
    sites = [site for site in sites if not any(program.depends(r, site.outs) for r in site.reads)]
    while True:
        taken: dict[int, Site] = {}
        for site in sites:
            taken |= {v: site for v in site.outs if v not in taken}
        live = program.needed(program.results, {}, taken)
        bad = [
            s for s in sites if any(d in live for d in s.dead) and any(v in live for v in s.outs)
        ]
        if not bad:
            break
        dead = {d for site in bad for d in site.dead}
        for site in [s for s in sites if dead & set(s.dead)]:
            inner = _INNER[site.what.split()[0]]
            why = f"its {inner} are read by {_readers(program, site.dead, live)}"
            left.append((site.outs[0], site.what, why, site.dead))
            sites.remove(site)
    used = [s for s in dict.fromkeys(taken.values()) if any(v in live for v in s.outs)]
    for site in losses.with_losses(used):
        program.sites |= dict.fromkeys(site.outs, site)


_INNER = {"attention": "scores", "loss": "logits", "norm": "statistics", "mlp": "hidden values"}


def _readers(program: Program, values: Iterable[int], live: set[int]) -> str:
    """Returns what reads values but for what they are replaced with: the last of each chain.

    Chains end at a result of the function that is as large, and at integers, which something chose.
    """
    seen, names, sizes = set(values), [], {program.avals[v].size for v in values}
    results = {v for v in program.results if program.avals[v].size in sizes}
    floating = lambda v: jnp.issubdtype(program.avals[v].dtype, jnp.floating)
    for equation in program.equations:
        outs = [v for v in equation.outs if v in live]
        if equation in program.shadowing or not outs or not seen & set(equation.operands):
            continue
        seen.update(filter(floating, outs))
        if any(v in results for v in outs):
            names.append("the function's result")
        elif not any(floating(v) and program.readers.get(v) for v in outs):
            names.append(program.described(equation))
    names = names or [
        program.described(r)
        for v in values
        for r in program.readers.get(v, ())
        if any(o in live for o in r.outs)
    ]
    if results & set(values):
        names.insert(0, "the function's result")
    return ", ".join(dict.fromkeys(names[:3])) or "something else"


def _skipped(skip: Skip, row: Row) -> bool:
    if not callable(skip):
        return any(word in row.where or word == row.domain for word in skip)
    try:
        return bool(skip(row))
    except Exception as error:
        raise Theirs(error) from error


def conclude(planned: Planned, codes: list[Row], function: Any, options: Options) -> None:
    """Hands the report over, warns where nothing was replaced, and sees what is required."""
    rows = []
    for site, row in planned:
        if site is not None and site.failed:
            row = Row(row.where, row.what, "", f"it could not be replaced: {site.failed}")
        rows.append(row)
    name = _name(function)
    if getattr(function, "fused_by_normfuse", False):
        codes = [*codes, Row(name, "program", "", "it is fused already")]
    result = Report((*rows, *codes))
    for word in () if callable(options.skip) else options.skip:
        if not any(_skipped((word,), row) for row in rows):
            places = [*dict.fromkeys(row.where for row in rows)]
            scopes = [part for place in places for part in re.split("[ /]", place)]
            warnings.warn(
                f"fuse: skip={word!r} is in no row of {name}{_nearest(word, (*DOMAINS, *scopes))}; "
                f"the domains are {', '.join(DOMAINS)}, the rows {', '.join(places[:5]) or 'none'}",
                stacklevel=4,
            )
    if options.report is not None:
        options.report(result)
    elif not result.fused:
        reasons = collections.Counter(row.reason for row in result.rows)
        most = "; ".join(reason for reason, _ in reasons.most_common(3))
        warnings.warn(
            f"fuse: nothing in {name} was replaced ({most or 'nothing was found'}); "
            "fuse(function, report=print) lists all",
            stacklevel=4,
        )
    for domain in options.require:
        of = lambda name: [row for row in result.rows if row.domain == name]
        own = of(domain) or of("program")
        left = [f"{row.where}: {row.reason}" for row in own if row.reason not in ("", SKIPPED)]
        if left or not own:
            why = "; ".join(left[:5]) or "none was found"
            raise ValueError(f"fuse: require={domain!r} is not met in {name}: {why}")


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
