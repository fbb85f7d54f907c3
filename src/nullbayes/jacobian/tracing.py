r"""The linearized network as a graph of plain tensor operations, for programs that are run without this library.

Forward mode cannot be traced. The product :math:`J v` is the derivative of :math:`u \mapsto J^\top u` by reverse mode,
whose value does not depend on :math:`u`; what remains in the graph is about what forward mode computes.

A graph is traced for a fixed number of examples. Traced for two numbers, it shows which sizes in it are multiples of
the number of examples: these are computed from the inputs, and the graph holds for any number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import functional_call, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from nullbayes.errors import ModelError
from nullbayes.jacobian.batches import leaves, map_leaves
from nullbayes.jacobian.network import Network
from nullbayes.precision import differentiable
from nullbayes.torch_internals import exporting

Finish = Callable[[Any, Tensor, Tensor], tuple[Tensor, ...]]  # inputs, outputs (n, ...), changes (S, n, ...)


def trace_linearized(network: Network, x: Any, vectors: Tensor, finish: Finish, *, any_number: bool) -> fx.GraphModule:
    r"""Return a graph that computes ``finish`` of ``x``, :math:`f(\theta, x)` and :math:`J(x)\,v` for each vector.

    Parameters
    ----------
    network : Network
        The network.
    x : Tensor, tuple or mapping
        Two or more examples of its inputs. The graph takes the tensors in it one after another.
    vectors : Tensor (S, P)
        The directions.
    finish : callable
        Takes inputs, outputs and changes, and returns the tensors that the graph returns.
    any_number : bool
        Whether the graph is to hold for any number of examples.

    Raises
    ------
    ModelError
        If an operation of the network cannot be traced.
    """
    graph = _trace(network, x, vectors, finish)
    if any_number:
        longer = map_leaves(lambda leaf: torch.cat([leaf, leaf[:1]]), x)
        _set_free(graph, _trace(network, longer, vectors, finish), len(next(leaves(x))))
    graph.recompile()
    return graph


def _trace(network: Network, x: Any, vectors: Tensor, finish: Finish) -> fx.GraphModule:
    trained, directions = network.unflatten(network.theta), network.unflatten(vectors)

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        given = iter(inputs)
        arguments = map_leaves(lambda _: next(given), x)

        def function(named: dict[str, Tensor]) -> Tensor:
            return network.evaluate(
                arguments, lambda args, kwargs: functional_call(network.module, named, args, kwargs)
            )

        outputs, backward = vjp(function, trained)[:2]
        ahead = vjp(lambda u: backward(u)[0], torch.zeros_like(outputs))[1]
        return finish(arguments, outputs, vmap(lambda named: ahead(named)[0])(directions))

    try:
        with differentiable(), exporting():
            graph = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*leaves(x))
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        msg = f"This network cannot be exported, because an operation of it cannot be traced: {first}"
        raise ModelError(msg) from error
    graph.graph.eliminate_dead_code()
    return graph


def _set_free(graph: fx.GraphModule, longer: fx.GraphModule, n: int) -> None:
    """Replace the sizes that differ between graphs for n and n + 1 examples by multiples of the number of examples."""
    nodes, others = list(graph.graph.nodes), list(longer.graph.nodes)
    if [(node.op, str(node.target)) for node in nodes] != [(node.op, str(node.target)) for node in others]:
        raise ModelError(_FIXED.format("it runs other operations for another number of examples"))
    after_inputs = next(node for node in nodes if node.op != "placeholder")
    with graph.graph.inserting_before(after_inputs):
        size = graph.graph.call_function(torch.ops.aten.sym_size.int, (nodes[0], 0))
    multiples: dict[int, Any] = {1: size}

    def freed(one: Any, other: Any, where: str) -> Any:
        if isinstance(one, (list, tuple)):
            return type(one)([freed(a, b, where) for a, b in zip(one, other, strict=True)])
        if isinstance(one, bool) or not isinstance(one, int) or one == other:
            return one
        factor = other - one
        if one != factor * n:
            raise ModelError(_FIXED.format(f"{where} has the sizes {one} and {other} for {n} and {n + 1} examples"))
        if factor not in multiples:
            with graph.graph.inserting_after(size):
                multiples[factor] = graph.graph.call_function(operator.mul, (size, factor))
        return multiples[factor]

    for node, other in zip(nodes, others, strict=True):
        if node.op == "get_attr" and not _equal(_constant(graph, node), _constant(longer, other)):
            raise ModelError(_FIXED.format("it makes a tensor that depends on the number of examples"))
        if node.op == "call_function":
            where = str(node.target)
            node.args = tuple(freed(a, b, where) for a, b in zip(node.args, other.args, strict=True))
            node.kwargs = {key: freed(value, other.kwargs[key], where) for key, value in node.kwargs.items()}
    graph.graph.lint()


_FIXED = "This network can be exported for a fixed number of examples alone, because {}: pass dynamic_batch=False."


def _constant(graph: fx.GraphModule, node: fx.Node) -> Any:
    return getattr(graph, str(node.target))


def _equal(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, Tensor) and one.shape == other.shape and torch.equal(one, other))
