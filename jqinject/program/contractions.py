"""Contractions of a program: which operand is a weight, and which of its axes may have several scales."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.dot import FrozenParam
from jqinject.dot.geometry.dimensions import Dimensions
from jqinject.dot.kernels import convolution, ragged
from jqinject.dot.schemes import scheme_fits
from jqinject.dot.tensors.choice import ContractionKind, check_choice, choose
from jqinject.dot.tensors.contract import contract_as
from jqinject.program import cache_writes, quantizers, scopes
from jqinject.program.jaxpr import Equation
from jqinject.program.operations import CONTRACTIONS, contraction_arguments, operand_axes
from jqinject.program.parameters import as_activation, name_of_quantizer, note_use, weight_among
from jqinject.program.policy import ActivationProduct, Choice, Site, dotted
from jqinject.program.run import OperationRun, Run
from jqinject.program.tracked_value import Evaluate, Origin, Path, Tracked, WeightCall, dtype_of, shape_of
from jqinject.proxy import transform_of
from jqinject.quant_tensor import QuantTensor, as_array, is_quantized

#: An output, and the token whose cotangent is the scale of its gradient, if backward its payload is contracted.
Product = tuple[jax.Array, jax.Array | None]


def contraction(step: OperationRun) -> list[Tracked]:
    """Run a contraction on quantized operands; caches in low bits among them are not opened yet."""
    run, eqn = step.run, step.eqn
    evaluate: Evaluate = eqn.bind
    lhs, rhs = step.inputs[:2]
    among = weight_among(lhs, rhs)
    weight = among if run.policy.follows_parameters else None
    read = next((x.weight_path for x in (lhs, rhs) if x.weight_path), ())
    choice, name = step.choose(() if weight is None else step.inputs[weight].weight_path, read)
    quantizes = [
        choice is not None and bool(choice.scheme or _declared(choice, *pair, place))
        for place, pair in enumerate(((lhs, rhs), (rhs, lhs)))
    ]
    (lhs, rhs), undo = cache_writes.opened_to_contract(eqn, (lhs, rhs), quantizes)
    if run.policy.flattens_weights and _is_flattened(step, rhs):
        outputs = rhs.value.shape[1:]  # of a weight with two axes, its output then reshaped

        def flattened(values: list[jax.Array]) -> list[jax.Array]:
            return [out.reshape(*out.shape[:-1], *outputs) for out in eqn.bind(values)]

        evaluate = flattened
        rhs = rhs.with_value(run.constant(lambda: rhs.value.reshape(rhs.value.shape[0], -1)))
    if lhs.origin is Origin.CONSTANT and lhs.is_float:
        run.policy.not_an_activation(step.path, f"the left operand of {name}")
    if run.policy.follows_parameters:
        lhs, rhs = (x if place == weight else as_activation(x) for place, x in enumerate((lhs, rhs)))
    rest = [x.array for x in step.inputs[2:]]
    parameter = () if among is None else step.inputs[among].weight_path
    own = _Contraction(step, choice, name, (lhs, rhs), rest, weight, parameter, evaluate, undo)
    if not (lhs.is_activation or rhs.is_activation):
        return [Tracked(own.value())]
    called = dotted(parameter) or run.names.full(name)
    return [run.quantizers.run(WeightCall(called, step.path, own.quantized, own.floating))]


@dataclass
class _Contraction:
    """One contraction: with its quantizers, and in floats.

    Attributes:
        operands: two, of which no looked-up one is an activation.
        rest: further operands.
        weight: which operand is a parameter that is quantized in its own shape, or None.
        read: path of the operand that is a parameter, however it is quantized; empty if neither is.
        evaluate: contracts arrays.
        undo: what the output goes through, as an operand is transformed; None for nothing.
    """

    step: OperationRun
    choice: Choice | None
    name: str
    operands: tuple[Tracked, Tracked]
    rest: list[jax.Array]
    weight: int | None
    read: Path
    evaluate: Evaluate
    undo: Callable[[jax.Array], jax.Array] | None

    @property
    def run(self) -> Run:
        """The run that it belongs to."""
        return self.step.run

    def quantized(self) -> Tracked:
        """The output with its quantizers."""
        out = self.run.output(self.value(), self.choice, self.name)
        out.fusible = True
        return out

    def floating(self) -> jax.Array:
        """The output without any quantizer, of the operands that it has."""
        floats = [
            x.floats if place == self.weight else self._floats(place) for place, x in enumerate(self.operands)
        ]
        with scopes.weight_scope(self.read or (self.run.names.full(self.name),)):
            (value,) = self.evaluate([*floats, *self.rest])
        return self._updated(value if self.undo is None else self.undo(value))

    def value(self) -> jax.Array:
        """The output before its own quantizer."""
        run, choice, operands = self.run, self.choice, self._quantized_operands()
        self._note(operands)
        with scopes.weight_scope(self.read or (run.names.full(self.name),)):
            if choice is not None and choice.scheme is not None:
                value, token = self._by_scheme(choice, operands), None
            else:
                value, token = self._in_numbers(operands)
        value = value if self.undo is None else self.undo(value)
        if run.has_rule:
            run.recorded.own_rules.update([run.names.full(self.name)] if _quantizes_backward(choice) else [])
        elif choice is not None and choice.grad is not None:
            name, shape = run.names.full(f"{self.name}_grad"), tuple(value.shape)
            site = run.add(Site(name, choice.grad, shape=shape, stack=run.stack, mesh_axes=run.mesh_axes))
            value = as_array(run.quantizers.quantize(site, value, token))
        return self._updated(value)

    def _in_numbers(self, operands: Sequence[Tracked]) -> Product:
        """The contraction by the payloads of its operands, as a parameter is stored, or by floats."""
        eqn, choice = self.step.eqn, self.choice
        numbers: ContractionKind = "auto" if choice is None else choice.contraction
        lhs, rhs = (x.value for x in operands)
        both = is_quantized(lhs) and is_quantized(rhs)
        product = self._of_payloads(numbers, lhs, rhs) if both else None
        product = product or _stored_product(eqn, numbers, operands)
        if product is None:
            (value,) = self.evaluate([*(x.array for x in operands), *self.rest])
            return value, None
        return product

    def _of_payloads(self, numbers: ContractionKind, lhs: QuantTensor, rhs: QuantTensor) -> Product | None:
        """The contraction of two QuantTensors by their payloads; None if the table says floats."""
        run, eqn, params = self.run, self.step.eqn, self.step.eqn.params
        y, sharding = eqn.outputs[0], params.get("out_sharding")
        abstract = jax.ShapeDtypeStruct(y.shape, y.dtype)
        gradient = run.quantizers.gradient_format(run.names.full(f"{self.name}_grad"), abstract)
        how: Any = {"gradient": gradient, "out_sharding": sharding}
        where: Any = None
        if eqn.name == "dot_general":
            where = Dimensions.of(lhs.ndim, rhs.ndim, params["dimension_numbers"])
        elif eqn.name == "conv_general_dilated":
            where = convolution.Convolution.of(
                lhs.shape, rhs.shape, **contraction_arguments(eqn), dtype=np.dtype(y.dtype)
            )
        elif eqn.name == "ragged_dot_general" and params.get("group_offset") is None and sharding is None:
            how["group_sizes"] = self.rest[0]
            if self.rest[0].ndim == 1:
                numbers_of_axes = params["ragged_dot_dimension_numbers"]
                where = ragged.Ragged.of(lhs, rhs, numbers_of_axes, y.dtype, params["precision"])
        elif numbers in ("int", "fp8"):
            raise ValueError(
                f"contraction={numbers!r} of {eqn.name} with these parameters is not defined: {params}\n"
                "  cure: contraction='auto'"
            )
        integers, swaps = gradient is not None and gradient.is_integer, sharding is None
        choice = choose(lhs, rhs, where, numbers, rounded=False, swaps=swaps, gradient=integers)
        check_choice(choice, where, numbers)
        return None if choice.kernel == "floats" else contract_as(choice, where, y.dtype, **how)

    def _floats(self, place: int) -> jax.Array:
        """An operand without its quantizer, but with the transform before it."""
        x, site = self.operands[place], self._site(place)
        return x.array if site is None else self.run.transformed(x, site)

    def _site(self, place: int) -> Site | None:
        """Where an operand is quantized; None if it is left as it is."""
        choice, eqn, policy = self.choice, self.step.eqn, self.run.policy
        x, partner = self.operands[place], self.operands[1 - place]
        if choice is None or not x.is_float:
            return None
        lhs, rhs = self.operands
        swapped = self.step.operation.name == "einsum" and lhs.is_weight and rhs.is_activation
        name = f"{self.name}_{('lhs', 'rhs')[place != swapped]}"
        axes, ndim = operand_axes(eqn)[place], len(shape_of(x))
        summed = axes.reduced
        if x.is_weight and not x.quantized and choice.weight is not None:
            return Site(name, choice.weight, {"channelwise_axes": policy.channel_axes(summed, ndim, True)})
        declared = _declared(choice, x, partner, place) if x.is_activation else None
        transforms, is_transformed = transform_of(declared) is not None, x.transform is not None
        if declared is None or (x.quantized and (is_transformed or not transforms)):
            return None
        if choice.dynamic:
            channels = policy.channel_axes(summed, ndim, False)
            return Site(name, choice.inputs, {"channelwise_axes": channels}) if partner.is_weight else None
        rows = () if summed == (ndim - 1,) or not quantizers.has_row_scales(declared) else summed
        own = {"transform_axes": axes.summed, "is_transformed": is_transformed} if transforms else {}
        return Site(name, declared, rows=rows, **own)

    def _quantized_operands(self) -> list[Tracked]:
        self._check_transforms()
        operands: list[Tracked] = []
        for place, x in enumerate(self.operands):
            if place == self.weight:
                operands.append(replace(x, chosen=None, twins={}))
                continue
            site = self._site(place)
            operands.append(x if site is None else self.run.quantized(x, site))
        return operands

    def _check_transforms(self) -> None:
        """Refuse a product of numbers that a cache holds transformed with others that are not.

        Raises:
            ValueError: it is one.
        """
        for place, x in enumerate(self.operands):
            partner = self.operands[1 - place]
            if x.transform is None or partner.transform == x.transform:
                continue
            declared = None if self.choice is None else _declared(self.choice, partner, x, 1 - place)
            if not partner.is_activation or transform_of(declared) != x.transform:
                side = ("lhs", "rhs")[1 - place]
                raise ValueError(
                    f"{self.run.names.full(self.name)}: its operand comes from the cache {x.cache}, which keeps "
                    f"numbers after {x.transform!r}, and the other operand is not transformed by it.\n"
                    f"  cure: Rule(..., op=..., {side}_quant=....let(pre_transform=...)) with the same transform, or "
                    "Recipe(Rotate('R3')) with inputs that read the cache"
                )

    def _note(self, operands: Sequence[Tracked]) -> None:
        """Note the use of a parameter, or a contraction of two activations."""
        run, eqn, kind, (lhs, rhs) = self.run, self.step.eqn, self.step.operation.name, self.operands
        if self.weight is not None:
            used, operand = self.operands[self.weight], operands[1 - self.weight]
            axes = operand_axes(eqn)[self.weight]
            note_use(self.step, self.choice, self.name, used, axes.reduced, operand, axes.free)
        elif lhs.is_activation and rhs.is_activation:
            by = (name_of_quantizer(run, self.choice, self.name, x) for x in operands)
            run.recorded.products.append(
                ActivationProduct(run.names.full(self.name), kind, *by, equation=eqn)
            )

    def _by_scheme(self, choice: Choice, operands: Sequence[Tracked]) -> jax.Array:
        """The contraction by a scheme, which quantizes its operands itself; a parameter comes quantized.

        Raises:
            ValueError: a scheme does not say how such a contraction is done.
        """
        run, eqn, weight = self.run, self.step.eqn, self.weight
        operands = [x if place == weight else self.operands[place] for place, x in enumerate(operands)]
        kind, operation = eqn.name, self.step.operation.name
        path: Path = () if weight is None else operands[weight].weight_path
        if kind not in CONTRACTIONS or (weight == 0 and kind != "dot_general"):
            where = dotted(path) or self.name
            image = "convolution with a parameter for its image"
            what = f"a {image if kind in CONTRACTIONS else operation}"
            raise ValueError(
                f"{where}: a scheme does not say how {what} is contracted ({self.name}).\n  cure: Rule({where!r}), "
                "which keeps it float, or a rule with weight_quant and input_quant, before the rule with the scheme"
            )
        own = weight if choice.parameter is not None else None
        site = run.add(
            Site(
                run.names.full(self.name),
                choice.scheme,
                is_weight=own is not None,
                weight_path=path,
                contraction=kind,
                stack=run.stack,
                equation=eqn,
                weight=weight,
            )
        )
        arrays = [x.value if place == own else x.array for place, x in enumerate(operands)]
        unrounded = None if own is None else operands[own].unrounded
        return run.quantizers.contract(site, [*arrays, *self.rest], unrounded)

    def _updated(self, value: jax.Array) -> jax.Array:
        """The output with the update of an adapter, if the parameter has one."""
        weight, run = self.weight, self.run
        used = None if weight is None else self.operands[weight]
        if weight is None or used is None or used.low_rank is None:
            return value
        x, low_rank = self._floats(1 - weight), used.low_rank
        name = run.names.full(self.name)
        names = (name, low_rank.lookup) if low_rank.lookup else (name,)
        run.recorded.adapted.update((used.weight_path, place) for place in names)
        if low_rank.dropout:
            x = run.quantizers.quantize(run.add(Site(low_rank.dropout, None)), x)
        low_rank = replace(low_rank, a=low_rank.a.astype(x.dtype), b=low_rank.b.astype(x.dtype))
        update = low_rank.contracted(self.step.eqn, x, weight, self.rest)
        if update is None:
            dense = jnp.broadcast_to(low_rank.dense(), shape_of(used)).astype(x.dtype)
            (update,) = self.evaluate([*((x, dense) if weight == 1 else (dense, x)), *self.rest])
        return value + update.astype(value.dtype)


def _stored_product(eqn: Equation, numbers: ContractionKind, operands: Sequence[Tracked]) -> Product | None:
    """The contraction of floats with a frozen parameter as it is stored; None if it is none of these.

    Args:
        eqn: its equation.
        numbers: which numbers the rule wants to be contracted.
        operands: two.
    """
    place = 0 if operands[1].stored is None else 1
    stored = operands[place].stored
    if eqn.name != "dot_general" or numbers == "float" or stored is None:
        return None
    x = operands[1 - place].array
    if np.dtype(x.dtype) != np.dtype(dtype_of(operands[place].value)):
        return None
    left, right = (len(shape_of(x)) for x in operands)
    dims = Dimensions.of(left, right, eqn.params["dimension_numbers"])
    dims = (dims if place == 1 else dims.swapped()).with_right(stored.order)
    sharding = eqn.params.get("out_sharding")
    if sharding is not None and not dims.is_ordered:
        return None
    choice = choose(x, FrozenParam.holding(stored.numbers, stored.form, {}), dims.plain, numbers)
    if choice.kernel != "stored":
        return None
    how = {"precision": eqn.params.get("precision"), "out_sharding": sharding}
    return dims.ordered(contract_as(choice, dims.plain, eqn.outputs[0].dtype, **how)[0]), None


def _quantizes_backward(choice: Choice | None) -> bool:
    """Whether quantizers of a contraction are used backward alone."""
    if choice is None or choice.scheme is None:
        return choice is not None and choice.grad is not None
    return scheme_fits.quantizes_backward(choice.scheme)


def _is_flattened(step: OperationRun, rhs: Tracked) -> bool:
    """Whether the weight has several output axes, which devices expect as one."""
    if step.eqn.name != "dot_general" or not rhs.is_weight or len(shape_of(rhs)) <= 2:
        return False
    axes = operand_axes(step.eqn)[1]
    channels = step.run.policy.channel_axes(axes.summed, rhs.value.ndim, True)
    return axes.summed == (0,) and not axes.batch and (step.operation.name != "einsum" or len(channels) > 1)


def _declared(choice: Choice, x: Tracked, partner: Tracked, place: int) -> object:
    own = (choice.lhs, choice.rhs)[place] if partner.is_activation else None
    return own or (None if choice.inputs is None else x.pending or choice.inputs)
