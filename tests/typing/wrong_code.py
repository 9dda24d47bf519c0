"""What a type checker has to refuse: every line that is marked as wrong, and no other."""

import jax.numpy as jnp
from flax import nnx

import jqinject
from jqinject import ExtendedInjector, IntQuantTensor, Rule
from jqinject.nn import QuantBatchNorm, QuantConv, QuantIdentity, QuantLinear, QuantLSTM, QuantReLU
from jqinject.quant import Int8ActPerTensorFloat, Int8WeightPerTensorFloat

rngs = nnx.Rngs(0)
x = jnp.ones((2, 8))

QuantLinear(8, 4)  # wrong: no rngs
QuantLinear(8, 4, rngs=0)  # wrong: rngs is a number
QuantLinear(8, rngs=rngs)  # wrong: no out_features
QuantLinear("8", 4, rngs=rngs)  # wrong: in_features is a text
QuantLinear(8, 4, True, rngs=rngs)  # wrong: use_bias is a keyword
QuantLinear(8, 4, wieght_bit_width=3, rngs=rngs)  # wrong: a misspelt prefix
QuantLinear(8, 4, weight_bitwidth=3, rngs=rngs)  # wrong: a misspelt name
QuantLinear(8, 4, weight_bit_width="3", rngs=rngs)  # wrong: a text for a number
QuantLinear(8, 4, weight_bit_width=3.5, rngs=rngs)  # wrong: half a bit
QuantLinear(8, 4, weight_signed="yes", rngs=rngs)  # wrong: a text for a flag
QuantLinear(8, 4, weight_scaling_impl_type="konst", rngs=rngs)  # wrong: no such member
QuantLinear(8, 4, weight_scaling_impl=3, rngs=rngs)  # wrong: a number for a component
QuantLinear(8, 4, my_own_name=3, rngs=rngs)  # wrong: a name without a prefix
QuantLinear(8, 4, weight_my_own_name=3, rngs=rngs)  # wrong: a name of a user's own goes through let
QuantLinear(8, 4, weight_quant="Int8WeightPerTensorFloat", rngs=rngs)  # wrong: a text for a quantizer
QuantLinear(8, 4, weight_quant=8, rngs=rngs)  # wrong: a number for a quantizer
QuantLinear(8, 4, weight_quant=Int8WeightPerTensorFloat(), rngs=rngs)  # wrong: an instance
QuantLinear(8, 4, weight_quant=nnx.Linear, rngs=rngs)  # wrong: another class
QuantLinear(8, 4, weights_quant=Int8WeightPerTensorFloat, rngs=rngs)  # wrong: a misspelt argument
QuantLinear(8, 4, contraction="itn", rngs=rngs)  # wrong: a misspelt contraction
QuantLinear(8, 4, return_quant_tensor="yes", rngs=rngs)  # wrong: a text for a flag
QuantConv(3, 8, kernel_size="3", rngs=rngs)  # wrong: a text for a size
QuantConv(3, 8, rngs=rngs)  # wrong: no kernel_size
QuantConv(3, 8, kernel_sise=3, rngs=rngs)  # wrong: a misspelt argument
QuantConv(3, 8, 3, weight_quant=[Int8WeightPerTensorFloat], rngs=rngs)  # wrong: a list
QuantReLU(bit_with=4)  # wrong: a misspelt name
QuantReLU(bit_width="4")  # wrong: a text for a number
QuantIdentity(4)  # wrong: a number for a quantizer
QuantBatchNorm(4, momentun=0.9, rngs=rngs)  # wrong: a misspelt argument of Flax's
QuantLSTM(3, 4, io_bit_widht=4, rngs=rngs)  # wrong: a misspelt name
QuantLSTM(3, 4, num_layers="2", rngs=rngs)  # wrong: a text for a number
quantizer = Int8WeightPerTensorFloat()  # wrong: a declaration is never instantiated
Int8WeightPerTensorFloat.let(4)  # wrong: let takes keywords
injector: ExtendedInjector = Int8WeightPerTensorFloat  # wrong: a class is not an instance
Rule(op=3)  # wrong: an operation is a text
Rule(op="dot_general", input_quant="int8")  # wrong: a text for a quantizer
Rule(weight_quant=Int8WeightPerTensorFloat, weight_bit_widht=4)  # wrong: a misspelt name
Rule(wieght_quant=Int8WeightPerTensorFloat)  # wrong: a misspelt argument
Rule(3)  # wrong: a path is a text

fc = QuantLinear(8, 4, rngs=rngs)
fc(x).scale  # wrong: an array has no scale
fc(x).value  # wrong: an array has no value
fc.kernell  # wrong: no such attribute
fc.quant_weigth()  # wrong: no such method
fc.quant_weight().scal  # wrong: no such field
quantized = QuantLinear(8, 4, input_quant=Int8ActPerTensorFloat, return_quant_tensor=True, rngs=rngs)
quantized(x).scal  # wrong: no such field
quantized(x).integers  # wrong: the method is called int
jnp.sum(fc(x, x, x))  # wrong: too many arguments
IntQuantTensor(x, 0.5).scal  # wrong: fields are missing
IntQuantTensor(x, 0.5, 0.0, 8, signed=True, training=False).scal  # wrong: no such field
jqinject.quantise(fc, [])  # wrong: no such function
jqinject.quantize(fc)  # wrong: no rules
jqinject.freeze()  # wrong: no model
jqinject.freeze(fc).kernell  # wrong: it is the same class of model
jqinject.report(fc, x).laiers  # wrong: no such field
jqinject.calibrate(fc, [x]).raport  # wrong: no such field
QuantLinear.overrides("weight_quant")  # wrong: quantizers are keywords
QuantLinear.overrides()["weight_bit_width"].typ  # wrong: no such field


def loss_fn(model: QuantLinear) -> float:
    return float(model(x).sum())


value, grads, more = jqinject.value_and_grad(loss_fn)(fc)  # wrong: a pair
jqinject.value_and_grad(loss_fn)(fc, x)  # wrong: loss_fn takes a model
jqinject.value_and_grad(loss_fn, has_auxx=True)  # wrong: a misspelt option
